"""A story for people: one event of a search as lines of text, and what it changes for the threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.server import CLOCK_START

if TYPE_CHECKING:
    from .world import Event, State, World

KINDS = ("request", "reply", "push")  # of messages, by number


def tell(world: World, event: Event, before: State, after: State) -> list[str]:
    """Return one event as text, and what it changes for the threads."""
    name = world.names[event.who] if event.who >= 0 else ""
    if event.kind == "tick":
        lines = [f"tick {after.now}", *_stops(world, before, after)]
    elif event.kind.startswith("arrives"):
        lines = _arrival(world, event, name)
    else:
        texts = {
            "restarts": f"the server {event.what}",
            "is revoked": f"a person revokes the lease of {event.what}",
            "receives a reply": f"{name} gets the reply for {event.what}",
            "breaks": f"{name}'s connection for {event.what} breaks",
            "notices": f"{name} notices that the connection for {event.what} has ended",
            "runs": f"{name} runs",
        }
        if event.kind == "is slow":
            text = f"(the {KINDS[event.content]} is slow: {name}, {event.what})"
        elif event.kind == "receives a push":
            text = f"{name} gets the push {world.contents[event.content].decode()!r}"
        else:
            text = texts.get(event.kind, f"{event.what} {event.kind}")
        lines = [f"  {text}"]
    return [*lines, *_news(world, before, after)]


def _stops(world: World, before: State, after: State) -> list[str]:
    """Return a line for each process that stands still from now on, although a timer of it is due."""
    stopped = zip(world.names, before.stopped, after.stopped, strict=True)
    return [f"  ({name} is stopped)" for name, was, is_now in stopped if is_now and not was]


def _arrival(world: World, event: Event, name: str) -> list[str]:
    calls, replies = world.contents[event.content]
    late = " (late: nobody waits for the reply)" if event.kind == "arrives late" else ""
    return [
        f"  the server gets {name}'s {_said(args)}: {_plain(reply)}{late}"
        for (_, args), reply in zip(calls, replies, strict=True)
    ]


def _news(world: World, before: State, after: State) -> list[str]:
    """Return a line for each new belief of a thread, and for each belief that lasts longer than before."""
    lines = list[str]()
    for who in range(len(world.names)):
        had = {each.thread: each for each in world.view(before, who).beliefs}
        for belief in world.view(after, who).beliefs:
            known = had.get(belief.thread)
            if known is not None and known.deadline_ms == belief.deadline_ms and known.fence == belief.fence:
                continue
            fence = "" if known is not None else f", fence {belief.fence - CLOCK_START}"
            lines.append(f"    {belief.thread} holds the lock until {belief.deadline_ms:.0f} ms{fence}")
    return lines


def _said(args: tuple[bytes, ...]) -> str:
    """Return a message as text: its verb, its tokens."""
    verb, *rest = (word.decode(errors="replace") for word in args[:-1])
    if verb == "heartbeat":
        rest = rest[2::2]
    elif verb in {"acquire", "release", "reserve"}:
        rest = rest[:1]
    return " ".join([verb, *rest])


def _plain(reply: Any) -> Any:
    """Return a reply with fences in µs since the world began."""
    if reply.__class__ is list:
        return [_plain(each) for each in reply]
    if isinstance(reply, int) and reply > CLOCK_START // 2:
        return reply - CLOCK_START
    return reply.decode(errors="replace") if isinstance(reply, bytes) else reply
