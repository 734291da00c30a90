"""Puts the docstrings into a page: `<!--api class NAME-->` and `<!--api module NAME-->` are where they stand.

A reader of the checkout sees no such mark, only the text and the examples around it. `states` are those names of a
module that are data: what calls return. `data` is one name that is neither class nor function.

The frameworks that the modules of `contrib` need are installed for the site, not imitated: a signature of a class
with an imitated base would be wrong.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import TYPE_CHECKING, Final

from sphinx.ext.napoleon import Config, GoogleDocstring

if TYPE_CHECKING:
    from types import ModuleType

    from sphinx.application import Sphinx

MARK: Final = re.compile(r"^<!--api (class|module|states|data) ([\w.]+)-->$", re.MULTILINE)
OF_OTHERS: Final = ("object", "Exception", "tuple", "dict", "Protocol", "Interlock", "ContextDecorator")
FRAMEWORKS: Final = {"celery", "django", "dramatiq"}  # whose bases describe themselves
CODE: Final = re.compile(r"(`[^`]*`)|(?<![\w*`])\*(?!\*)|(?<=:)\*")


def filled(text: str) -> str:
    """The text of a page, with a block for Sphinx in place of each mark."""
    return MARK.sub(lambda found: f"```{{eval-rst}}\n{_block(*found.groups())}\n```", text)


def _block(what: str, name: str) -> str:
    if what == "class":
        return _class(name)
    if what == "data":
        return f".. autodata:: {name}\n   :no-value:"
    module = _imported(name)
    public = [each for each in getattr(module, "__all__", ()) if _is_described(getattr(module, each), name)]
    if what == "states":
        return "\n\n".join(_class(f"{name}.{each}") for each in public if _is_data(getattr(module, each)))
    own = [each for each in public if name != "interlock.aio" or getattr(module, each).__module__ == name]
    return "\n\n".join([f".. rubric:: {name}", *(_member(f"{name}.{each}", getattr(module, each)) for each in own)])


def _member(name: str, thing: object) -> str:
    return _class(name) if inspect.isclass(thing) else f".. autofunction:: {name}"


def _class(name: str) -> str:
    module, _, own_name = name.rpartition(".")
    if module.startswith(("interlock.contrib.", "interlock.fence.django")):
        kind = getattr(_imported(module), own_name)
        if {each.__module__.partition(".")[0] for each in kind.__mro__} & FRAMEWORKS:
            own = [each for each, value in vars(kind).items() if each[0] != "_" and inspect.getdoc(value)]
            own = [
                each for each in own if inspect.isroutine(vars(kind)[each]) or isinstance(vars(kind)[each], property)
            ]
            return f".. autoclass:: {name}\n   :members: {', '.join(own)}"
    return f".. autoclass:: {name}\n   :members:\n   :inherited-members: {', '.join(OF_OTHERS)}"


def _is_described(thing: object, module: str) -> bool:
    """Whether a module describes this name of its `__all__`: no data, and of `contrib` nothing of another module."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return False
    home = f"{thing.__module__}."
    return not module.startswith("interlock.contrib.") or home.startswith(f"{module}.") or "._" in home


def _imported(name: str) -> ModuleType:
    if "django" in name:  # whose models need settings before they are imported
        import django  # noqa: PLC0415
        from django.conf import settings  # noqa: PLC0415

        if not settings.configured:
            settings.configure()
            django.setup()
    return importlib.import_module(name)


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
