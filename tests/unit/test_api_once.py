"""The public methods: both modes show the same names, signatures and docstrings, and an editor jumps to their text."""

from __future__ import annotations

import functools
import inspect
import pydoc
import re
import types
from pathlib import Path

import pytest

import interlock._api
import interlock.aio
import interlock.threads
from interlock._api.face import Face
from interlock._api.misuse_errors import OF_EACH_LOCK, OF_INTERLOCK

MODES = [interlock.threads, interlock.aio]
CLASSES = [
    name
    for name in interlock.threads.__all__
    if inspect.isclass(getattr(interlock.threads, name)) and issubclass(getattr(interlock.threads, name), Face)
]
INTERNAL = re.compile(r"self\._|\b_(?!_)\w+|\b[A-Z]\w*T\b|\w+Core\b|\.\.\.\)")  # private names and type variables


def members(cls) -> dict:
    """What its users call or read."""
    kinds = types.FunctionType | classmethod | property
    return {
        name: member
        for name, member in inspect.getmembers_static(cls)
        if not name.startswith("_") and isinstance(member, kinds)
    }


def function(member):
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def both(name) -> list:
    return [getattr(module, name) for module in MODES]


@pytest.mark.parametrize("module", MODES, ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", CLASSES)
def test_a_method_has_its_public_name_everywhere(module, name):
    cls = getattr(module, name)
    assert cls.__module__ == module.__name__
    for each, member in members(cls).items():
        made = function(member)
        assert made.__name__ == each
        assert made.__qualname__.split(".")[-1] == each
        if not isinstance(member, property):
            assert not INTERNAL.search(str(inspect.signature(made))), each
        if each in vars(cls):
            assert made.__qualname__ == f"{name}.{each}"
            assert made.__module__ == module.__name__
            assert inspect.getsourcefile(inspect.unwrap(made)) == module.__file__  # where an editor jumps to
            assert re.search(rf"^ +(async )?def {each}\(", inspect.getsource(made), re.MULTILINE)


@pytest.mark.parametrize("module", MODES, ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", CLASSES)
def test_help_shows_what_users_call(module, name):
    text = pydoc.render_doc(getattr(module, name), renderer=pydoc.plaintext)
    for line in re.findall(r"^ \|  (?:async )?(\w+\(.*\).*)$", text, re.MULTILINE):
        # Users make an Interlock only, and an Interlock makes the others; Python 3.14 shows a method of typing.Generic.
        if not line.startswith(("__init", "__class_getitem__", name)):
            assert not INTERNAL.search(line), line
    for each in members(getattr(module, name)):
        assert re.search(rf"^ \|  (?:async )?{each}(?:\(| = |$)", text, re.MULTILINE), each


@pytest.mark.parametrize("name", CLASSES)
def test_both_modes_have_the_same_signatures_and_docstrings(name):
    blocking, awaited = both(name)
    assert inspect.getdoc(blocking) == inspect.getdoc(awaited)
    assert members(blocking).keys() == members(awaited).keys()
    for each, member in members(blocking).items():
        one, other = function(member), function(members(awaited)[each])
        assert one.__doc__, each
        assert one.__doc__ == other.__doc__, each
        signatures = [inspect.signature(made).parameters.values() for made in (one, other)]
        shapes = [[(each.name, each.kind, each.default) for each in parameters] for parameters in signatures]
        assert shapes[0] == shapes[1], each


@pytest.mark.parametrize("name", CLASSES)
def test_what_waits_is_awaited_in_asyncio_and_called_in_threads(name):
    blocking, awaited = both(name)
    for each, member in members(blocking).items():
        waits, steps = inspect.iscoroutinefunction(getattr(blocking, f"_{each}", None)), each == "observe"
        other = function(members(awaited)[each])
        assert inspect.iscoroutinefunction(other) is waits, each
        assert inspect.isasyncgenfunction(other) is steps, each
        assert not inspect.iscoroutinefunction(member), each
        assert inspect.isgeneratorfunction(member) is steps, each


def test_only_the_two_modes_know_threads_and_asyncio():
    for path in Path(interlock._api.__file__).parent.glob("*.py"):
        if path.stem not in {"threads", "asyncio", "scopes"}:
            mode = r"^ *(import asyncio|from \.(threads|asyncio|scopes) |from interlock\._(transports|servers)\.)"
            assert not re.search(mode, path.read_text(), re.MULTILINE), path.name


def test_a_method_is_a_function_of_its_class():
    for cls in both("Lock"):
        assert inspect.isfunction(cls.acquire)
        assert cls.acquire is not cls._acquire
    assert interlock.threads.Semaphore.acquire.__kwdefaults__ is None  # a wrapper of the core, which has them
    assert [*interlock.aio.Semaphore.acquire.__kwdefaults__] == ["timeout", "permits"]


@pytest.mark.parametrize("cls", both("Lock"), ids=lambda cls: cls.__module__)
def test_a_subclass_of_a_user_keeps_the_docstrings_and_may_have_its_own(cls):
    class Mine(cls):
        """Mine."""

        @functools.wraps(print)
        def inspect(self, LeaseT: int) -> None:
            """Something else."""

    assert inspect.getdoc(Mine) == "Mine."
    assert Mine.inspect.__wrapped__ is print
    assert Mine.acquire is cls.acquire


def test_the_errors_know_all_options_that_the_methods_have():
    def options(method) -> set[str]:
        return {each.name for each in inspect.signature(method).parameters.values() if each.kind is each.KEYWORD_ONLY}

    for made, kinds_of_options in zip(both("Interlock"), both("Options"), strict=True):
        assert options(made) == {*OF_INTERLOCK, "confirm"}
        assert options(made.lock) == set(OF_EACH_LOCK) == set(kinds_of_options.__annotations__)


def test_an_error_says_of_each_option_where_it_belongs():
    locks = interlock.threads.Interlock("redis://localhost:1")
    with pytest.raises(TypeError, match="an option of each lock"):
        interlock.threads.Interlock("redis://localhost:1", max_waiters=5)
    with pytest.raises(TypeError, match="Give this option to each lock"):
        locks.multi(locks.lock("a"), confirm=False)
    with pytest.raises(TypeError, match=r"Did you mean confirm=\?"):
        locks.lock("a", confrim=False)
