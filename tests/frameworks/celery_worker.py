"""Workers and beats of celery_app.py, and a client that queues its tasks by their names."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path

import redis
from celery import Celery

from harness.commands import Command, python
from interlock import Interlock

LONG = 60  # seconds that a busy machine may need for what takes one
TASKS = "frameworks.celery_app."


class Client:
    """What a test uses of the broker: it queues tasks, and reads what they have written."""

    def __init__(self, url: str) -> None:
        self.app = Celery("client", broker=url, backend=url, set_as_current=False)
        self.witness = redis.Redis.from_url(url, decode_responses=True)
        self.locks = Interlock(url, max_ttl=20)

    def signature(self, name: str, *args, **kwargs):
        return self.app.signature(TASKS + name, args=args, kwargs=kwargs)

    def send(self, name: str, *args, **kwargs):
        return self.signature(name, *args, **kwargs).apply_async()

    def overlaps(self) -> list[str]:
        return self.witness.lrange("overlaps", 0, -1)

    def close(self) -> None:
        self.locks.close()
        self.witness.close()
        self.app.close()


def project(monkeypatch, node, **environment: str):
    """The module celery_app.py, made anew for this server: its tasks, as a user's own web process has them."""
    for name, value in {"BROKER": node.tcp_url, **environment}.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location(TASKS.rstrip("."), Path(__file__).with_name("celery_app.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.app.finalize()
    return module


def client_of(node) -> Client:
    return Client(node.tcp_url)


def lives_of(client: Client) -> int:
    """How many runs have begun."""
    return sum(client.witness.llen(key) for key in client.witness.scan_iter("began:*"))


@contextmanager
def worker(node, directory: Path, *options: str, name: str = "one", env=None):
    """A worker that is ready. It ends as if the machine lost its power, if it has not ended before."""
    command = Command(
        python(
            "-m", "celery", "-A", TASKS.rstrip("."), "worker", "-n", f"{name}@test", "-l", "INFO",
            "--without-mingle", "--without-gossip", "--without-heartbeat", *options,
        ),
        cwd=directory, log=directory / f"worker_{name}.log", env={"BROKER": node.tcp_url, **(env or {})},
    )  # fmt: skip
    try:
        command.says(r"test ready")
        yield command
    finally:
        command.kill_all()


@contextmanager
def beat(node, directory: Path, name: str, env=None):
    """A beat with a schedule file of its own, as on a machine of its own."""
    command = Command(
        python(
            "-m", "celery", "-A", TASKS.rstrip("."), "beat", "-S", "interlock.contrib.celery:Beat", "-l", "INFO",
            "-s", directory / f"schedule_{name}", "--pidfile=",
        ),
        cwd=directory, log=directory / f"beat_{name}.log", env={"BROKER": node.tcp_url, **(env or {})},
    )  # fmt: skip
    try:
        yield command
    finally:
        command.kill_all()
