"""Finalizers: of objects whose constructor an interrupt has ended, and of a program that shuts down."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

import interlock
import interlock.aio
import interlock.compat.threading as compat
from interlock._api.asyncio import SectionForAsyncio
from interlock._api.section import CallSection, Section
from interlock._api.threads import SectionForThreads


def subclasses(cls):
    return [cls, *(each for sub in cls.__subclasses__() for each in subclasses(sub))]


@pytest.mark.parametrize(
    "cls",
    [
        *dict.fromkeys(subclasses(Section)),
        interlock.Lease,
        interlock.aio.Lease,
        interlock.MultiLease,
        interlock.Interlock,
    ],
    ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}",
)
def test_an_object_whose_constructor_was_interrupted_goes_in_silence(cls, monkeypatch):
    assert {SectionForThreads, SectionForAsyncio, CallSection} <= {*subclasses(Section)}
    assert any(each.__module__ == compat.__name__ for each in subclasses(Section))
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    made = cls.__new__(cls)
    del made
    gc.collect()
    assert not said


AT_SHUTDOWN = """
import os, sys
from interlock import Interlock

def say(text, write=os.write):
    write(1, text.encode())

class Late:
    def __init__(self, use):
        self.use, self.me = use, self

    def __del__(self, say=say):
        try:
            self.use()
        except BaseException as error:
            say(f"{type(error).__name__}: {error}")

def enter(locks):
    with locks.lock("a", timeout=1):
        pass

how, url = sys.argv[1:]
locks = None if how == "new" else Interlock(url)
late = Late({
    "new": lambda Interlock=Interlock: Interlock(url), "with": lambda enter=enter, locks=locks: enter(locks),
    "acquire": lambda locks=locks: locks.lock("a").acquire(timeout=1),
}[how])
"""


@pytest.mark.parametrize("how", ["new", "with", "acquire"])
def test_a_first_use_while_python_shuts_down_is_refused_in_clear_words(how):
    ran = subprocess.run(
        [sys.executable, "-c", AT_SHUTDOWN, how, "redis://localhost:1/0"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not ran.stderr
    assert ran.stdout.startswith("ConfigError: "), ran.stdout
    assert "Python is shutting down" in ran.stdout
    assert "ImportError" not in ran.stdout
