"""Puts the docstrings into a page: `<!--api class NAME-->` and `<!--api module NAME-->` are where they stand.

A reader of the checkout sees no such mark, only the text and the examples around it. `states` are those names of a
module that are data: what calls return.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import TYPE_CHECKING, Final

from sphinx.ext.napoleon import Config, GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MARK: Final = re.compile(r"^<!--api (class|module|states) ([\w.]+)-->$", re.MULTILINE)
CODE: Final = re.compile(r"(`[^`]*`)|(?<![\w*`])\*(?!\*)|(?<=:)\*")


def filled(text: str) -> str:
    """The text of a page, with a block for Sphinx in place of each mark."""
    return MARK.sub(lambda found: f"```{{eval-rst}}\n{_block(*found.groups())}\n```", text)


def _block(what: str, name: str) -> str:
    if what == "class":
        return _class(name)
    module = importlib.import_module(name)
    public = [each for each in getattr(module, "__all__", ()) if inspect.getmodule(getattr(module, each)) is not None]
    if what == "states":
        return "\n\n".join(_class(f"{name}.{each}") for each in public if _is_data(getattr(module, each)))
    own = [each for each in public if name != "interlock.aio" or getattr(module, each).__module__ == name]
    return "\n\n".join([f".. rubric:: {name}", *(_member(f"{name}.{each}", getattr(module, each)) for each in own)])


def _member(name: str, thing: object) -> str:
    return _class(name) if inspect.isclass(thing) else f".. autofunction:: {name}"


def _class(name: str) -> str:
    return f".. autoclass:: {name}\n   :members:\n   :inherited-members: object, Exception, tuple, dict"


def as_sphinx_reads_it(  # what an event of autodoc calls
    _app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """A docstring as Sphinx reads it: `Args:` is a list of arguments, and a star is a star.

    Napoleon takes what stands before a colon in the docstring of a property for a type, so it does not see those.
    """
    lines[:] = [CODE.sub(lambda found: found[0] if found[1] else "\\*", line) for line in lines]
    if what not in {"property", "attribute", "data"}:
        lines[:] = GoogleDocstring(lines, Config(), None, what, name, thing, options).lines()


def _is_data(thing: object) -> bool:
    return inspect.isclass(thing) and (dataclasses.is_dataclass(thing) or issubclass(thing, tuple))
