"""A process that runs commands on locks: one JSON command a line on stdin, one JSON answer a line on stdout.

    python lock_client.py URL threads|asyncio [os.fork|unseen]

Commands: ["acquire", lock, {options}, timeout], ["release", lock], ["ensure", lock], ["lost", lock],
["fork", lock], ["on_sigterm"], ["exit"]. An answer is the result, or {"error": class, "text": message}.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

from harness.unseen import hide_forks

hide_forks()

import interlock  # noqa: E402
import interlock.aio  # noqa: E402


class Blocking:
    """The threads' API, as coroutines that never wait for the loop."""

    def __init__(self, url: str) -> None:
        self.locks = interlock.Interlock(url)
        self.leases: dict = {}

    async def acquire(self, name, options, timeout):
        lease = self.leases[name] = self.locks.lock(name, **options).acquire(timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def twice(self, name, options, timeout):
        for _ in range(2):
            lease = self.leases[name] = self.locks.rlock(name, **options).acquire(timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def permit(self, name, limit, options, timeout):
        lease = self.leases[name] = self.locks.semaphore(name, limit, **options).acquire(timeout=timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def reader(self, name, options, timeout):
        lease = self.leases[name] = self.locks.rwlock(name, **options).read().acquire(timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def together(self, names, options, timeout):
        locks = [self.locks.lock(name, **options) for name in names]
        self.leases[names[0]] = self.locks.multi(*locks).acquire(timeout)

    async def arrive(self, name, parties, timeout):
        return self.locks.barrier(name, parties).wait(timeout)

    async def latched(self, name, count, timeout):
        self.locks.latch(name, count).wait(timeout)

    async def lead(self, name, options, timeout):
        lease = self.leases[name] = self.locks.election(name, **options).campaign(timeout)
        return {"token": lease.token, "term": lease.term}

    async def runs(self, name, options):
        """Begin a run of `once` that never ends."""
        return bool(
            self.locks.once(name, **options).run(lambda lease: say({"result": lease.token}) or time.sleep(1000))
        )

    async def release(self, name):
        return self.leases[name].release()

    async def fork(self, name):
        """Fork; what the child sees of the holder's lease, sent through a pipe."""
        read, write = os.pipe()
        if not os.fork():
            answer = {}
            lease = self.leases[name]
            answer["remaining"], answer["state"] = lease.remaining(), lease.state.value
            answer["lost"], answer["ended"] = lease.lost.is_set(), lease.ended.is_set()
            calls = {
                "ensure": lease.ensure,
                "execute": lambda: lease.execute("SET", "written", "child"),
                "extend": lambda: lease.extend(9),
                "exit": lambda: lease.__exit__(None, None, None),
                "release": lease.release,
            }
            for what, call in calls.items():
                try:
                    answer[what] = call()
                except interlock.LockError as error:
                    answer[what] = type(error).__name__
            answer["busy"] = self.locks.lock(name).try_acquire() is None
            mine = self.locks.lock(f"{name}:child").acquire(5)
            answer["own"] = mine.token.split("/")[1] == str(os.getpid())
            os.write(write, json.dumps(answer).encode())
            os._exit(0)  # a normal exit would also do; this one must not hurt the parent either
        os.close(write)
        with os.fdopen(read) as told:
            answer = json.loads(await asyncio.get_running_loop().run_in_executor(None, told.read))
        os.wait()
        return answer


class Async(Blocking):
    def __init__(self, url: str) -> None:
        self.locks = interlock.aio.Interlock(url)
        self.leases = {}

    async def acquire(self, name, options, timeout):
        lease = self.leases[name] = await self.locks.lock(name, **options).acquire(timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def twice(self, name, options, timeout):
        for _ in range(2):
            lease = self.leases[name] = await self.locks.rlock(name, **options).acquire(timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def permit(self, name, limit, options, timeout):
        lease = self.leases[name] = await self.locks.semaphore(name, limit, **options).acquire(timeout=timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def reader(self, name, options, timeout):
        lease = self.leases[name] = await self.locks.rwlock(name, **options).read().acquire(timeout)
        return {"token": lease.token, "fence": lease.fence}

    async def together(self, names, options, timeout):
        locks = [self.locks.lock(name, **options) for name in names]
        self.leases[names[0]] = await self.locks.multi(*locks).acquire(timeout)

    async def arrive(self, name, parties, timeout):
        return await self.locks.barrier(name, parties).wait(timeout)

    async def latched(self, name, count, timeout):
        await self.locks.latch(name, count).wait(timeout)

    async def lead(self, name, options, timeout):
        lease = self.leases[name] = await self.locks.election(name, **options).campaign(timeout)
        return {"token": lease.token, "term": lease.term}

    async def runs(self, name, options):
        async def forever(lease):
            say({"result": lease.token})
            await asyncio.sleep(1000)

        return bool(await self.locks.once(name, **options).run(forever))

    async def release(self, name):
        return await self.leases[name].release()

    async def fork(self, name):
        read, write = os.pipe()
        if not os.fork():
            lease = self.leases[name]
            answer = {"remaining": lease.remaining(), "state": lease.state.value}
            answer["lost"], answer["ended"] = lease.lost.is_set(), lease.ended.is_set()
            try:
                lease.ensure()
            except interlock.LockError as error:
                answer["ensure"] = type(error).__name__

            async def child():
                calls = {
                    "execute": lambda: lease.execute("SET", "written", "child"),
                    "extend": lambda: lease.extend(9),
                    "exit": lambda: lease.__aexit__(None, None, None),
                    "release": lease.release,
                }
                for what, call in calls.items():
                    try:
                        answer[what] = await call()
                    except interlock.LockError as error:
                        answer[what] = type(error).__name__
                answer["busy"] = await self.locks.lock(name).try_acquire() is None
                mine = await self.locks.lock(f"{name}:child").acquire(5)
                answer["own"] = mine.token.split("/")[1] == str(os.getpid())
                await mine.release()

            asyncio._set_running_loop(None)
            asyncio.run(child())
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as told:
            answer = json.loads(await asyncio.get_running_loop().run_in_executor(None, told.read))
        os.wait()
        return answer


async def main(url: str, mode: str, *_how: str) -> None:
    client = (Blocking if mode == "threads" else Async)(url)
    loop = asyncio.get_running_loop()
    say({"pid": os.getpid()})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        verb, *args = json.loads(line)
        if verb == "exit":
            return
        if verb == "on_sigterm":  # as a service does
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            say({"result": None})
            continue
        try:
            if verb in {"ensure", "state", "lost", "remaining"}:
                value = getattr(client.leases[args[0]], verb)
                result = value.is_set() if verb == "lost" else value() if callable(value) else value
            else:
                result = await getattr(client, verb)(*args)
            say({"result": result})
        except interlock.LockError as error:
            say({"error": type(error).__name__, "text": str(error)})


def say(what) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
