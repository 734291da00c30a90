"""A substitute for the module asyncio, over simulated coroutines, for the parts of it that the API uses."""

from __future__ import annotations

import asyncio
import inspect
import types
from typing import TYPE_CHECKING, Any

from .coroutines import Cancelled, Future, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from .scheduler import World


def asyncio_of(world: Callable[[], World]) -> types.SimpleNamespace:
    """Return a module asyncio whose current task is that of this world."""

    def current_task() -> Task | None:
        return world().current

    async def sleep(_: float) -> None:
        task, future = current_task(), Future()
        assert task is not None
        task.world.soon(lambda: future.resolve(None), task)
        await future

    async def gather(*works: Coroutine[Any, Any, Any], return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        caller = current_task()
        if caller is not None:
            return await _together(caller, works)
        for work in works:  # the simulation is over, and closes its coroutines
            work.close()
        return []

    replaced = {"current_task": current_task, "sleep": sleep, "gather": gather, "CancelledError": Cancelled}
    return types.SimpleNamespace(**(vars(asyncio) | replaced))


async def _together(caller: Task, works: tuple[Coroutine[Any, Any, Any], ...]) -> list[Any]:
    results: list[Any] = [None] * len(works)
    left, over = len(works), Future()

    async def one(place: int, work: Coroutine[Any, Any, Any]) -> None:
        nonlocal left
        try:
            results[place] = await work
        except Exception as error:  # noqa: BLE001 (gather returns every exception as a result)
            results[place] = error
        finally:
            left -= 1
            if not left:
                over.resolve(None)

    tasks = [caller.process.spawn(one(i, work), f"{caller.label}.{i}") for i, work in enumerate(works)]
    for task in tasks:
        if caller.in_section:
            task.enter(caller.era)
    try:
        await over
    except BaseException:
        for task in tasks:
            task.cancel()
        for work in works:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # a coroutine that has not begun would warn
        raise
    return results
