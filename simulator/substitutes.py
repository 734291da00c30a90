"""Runs interlock with other clocks and other chance, and with no garbage collector, which might drop leases."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


@contextlib.contextmanager
def substituted(substitutes: Mapping[str, Any]) -> Generator[None]:
    """Replace modules and functions in every module of interlock that imports them, by the name of the import."""
    collecting = gc.isenabled()
    gc.disable()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(("interlock._", "interlock.primitives.")) or name == "interlock.aio":
                for attribute, substitute in substitutes.items():
                    if hasattr(module, attribute):
                        stack.enter_context(mock.patch.object(module, attribute, substitute))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            if collecting:
                gc.enable()
