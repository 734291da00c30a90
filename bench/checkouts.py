"""What another checkout of interlock sends: its own Python is run against the server, and MONITOR says what it sent.

So the messages of any version can be sent again, with other tokens and other names, without knowing their layout: a
message is a template in which the token and the name of the lock are replaced.
"""

from __future__ import annotations

import io
import os
import secrets
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from floor import Tapped, packed
from measure import Before

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
BASELINE = "49003b8"  # the commit before the work on speed began
NAME = "recorded-0000"  # of the lock; other names have the same length
# Two Interlocks, since contenders of one may queue in their process. The waiter comes in another thread.
PROGRAM = """
import sys, threading, time
import interlock
from interlock import Interlock
assert interlock.__file__.startswith(sys.argv[3]), interlock.__file__
one, other = Interlock(f"unix://{sys.argv[1]}"), Interlock(f"unix://{sys.argv[1]}")
lock, again = one.lock(sys.argv[2], ttl=30), other.lock(sys.argv[2], ttl=30)
for _ in range(3):
    pair = lock.acquire()
    pair.release()
held = lock.acquire()
leases = []
waiter = threading.Thread(target=lambda: leases.append(again.acquire(timeout=20)))
waiter.start()
while not lock.inspect().waiters:
    time.sleep(0.02)
time.sleep(0.3)  # the waiter asks again after it has subscribed
held.release()
waiter.join()
leases[0].release()
one.close(); other.close()
print(pair.token); print(held.token); print(leases[0].token)
"""


@dataclass(frozen=True)
class Template:
    """A message that was sent once. `packed()` makes another copy of it."""

    words: Sequence[str]
    token: str

    def packed(self, token: str, name: str = NAME) -> bytes:
        return packed([word.replace(self.token, token).replace(NAME, name) for word in self.words])

    def keys(self, name: str) -> list[str]:
        return [key.replace(NAME, name) for key in self.words[3 : 3 + int(self.words[2])]]


def fresh_token() -> str:
    """A token of the usual length."""
    return f"somehost/12345/MainThread/{secrets.token_hex(16)}"


@dataclass(frozen=True)
class Messages:
    """What one version of interlock sends for an uncontended pair, and for a handover."""

    acquire: Template
    release: Template
    enqueue: Template
    hand_over: Template
    confirm: Template
    channels: tuple[str, ...]


def record(path: str, src: str) -> Messages:
    """Run the interlock of these sources against the server, and return the messages that it sent."""
    said: list[str] = []

    def body() -> None:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, path, NAME, src], env={**os.environ, "PYTHONPATH": src},
            stdout=subprocess.PIPE, text=True, check=True, timeout=60,
        )  # fmt: skip
        said.extend(done.stdout.split())

    commands = Tapped(path, body).commands
    pair, held, waiter = said

    def of(token: str, commands: list[list[str]]) -> list[Template]:
        return [Template(c, token) for c in commands if c[0] == "EVALSHA" and any(token in word for word in c)]

    released = commands.index(list(of(held, commands)[-1].words))
    waiting = of(waiter, commands[:released])
    return Messages(
        acquire=of(pair, commands)[0],
        release=of(pair, commands)[-1],
        enqueue=[each for each in waiting if len(each.words) == len(waiting[0].words)][-1],  # and no heartbeat
        hand_over=of(held, commands)[-1],
        confirm=of(waiter, commands[released:])[0],
        channels=tuple(word for c in commands if "SUBSCRIBE" in c[0].upper() for word in c[1:]),
    )


def find(wanted: str, unpacked: Path) -> Before | None:
    """The checkout at this path, or of this commit, which is unpacked there. None if there is neither."""
    if (path := Path(wanted, "src")).is_dir():
        return Before(wanted, str(path.resolve()))
    archive = subprocess.run(["git", "-C", ROOT, "archive", wanted, "src"], capture_output=True, check=False)
    if archive.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(unpacked, filter="data")
    return Before(f"commit {wanted}", str(unpacked.resolve() / "src"))
