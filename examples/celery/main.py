"""Starts the whole shop: a Valkey, two workers, two beats. Queues payments, kills a process, and counts.

python examples/celery/main.py
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from interlock.embedded import Server

HERE = pathlib.Path(__file__).parent


def main() -> None:
    with Server() as server, tempfile.TemporaryDirectory() as directory:
        broker = f"redis+socket://{server.socket}"
        os.environ |= {"BROKER": broker, "LOCKS": server.url, "BOOKS": directory}
        sys.path.insert(0, str(HERE))
        started = [start(directory, "worker", "-c", "2", "-n", f"{name}@shop") for name in ("one", "two")]
        started += [
            start(directory, "beat", "-S", "interlock.contrib.celery:Beat", "-s", f"{directory}/{name}", "--pidfile=")
            for name in ("here", "there")
        ]
        try:
            sell()
        finally:
            for each in started:
                each.terminate()
            for each in started:
                each.wait()


def start(directory: str, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "-A", "shop", *words]
    log = pathlib.Path(directory, "log").open("ab")  # noqa: SIM115 (its processes write into it)
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)


def sell() -> None:
    import shop

    payments = [shop.pay.delay(user, 100) for _ in range(5) for user in ("ann", "bob")]
    reports = [shop.report.delay("monday") for _ in range(3)]
    print(f"{len({each.id for each in reports})} report is queued, of {len(reports)} that were asked for")

    while not payments[0].ready():
        time.sleep(0.05)
    active = shop.app.control.inspect(timeout=2).active() or {}
    busy = [task["worker_pid"] for tasks in active.values() for task in tasks if task["name"] == "shop.pay"]
    for pid in busy[:1]:
        os.kill(pid, signal.SIGKILL)
        print("one process is killed while it holds a lock")

    for each in payments:
        each.get(timeout=60)
    print(reports[0].get(timeout=60))
    for user in ("ann", "bob"):
        total = sum(json.loads((shop.BOOKS / user).read_text()).values())
        print(f"{user} has paid {total}, of 500")
        assert total == 500


if __name__ == "__main__":
    main()
