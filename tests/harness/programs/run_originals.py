"""A plugin for pytest that runs tests of another library: `-p run_originals`, with ORIGINALS in the environment.

ORIGINALS is a text in JSON: `left_out` has patterns of the tests that do not run; `replaced` has, by module, each name
that this plugin replaces there before a test module is imported, and the place of what replaces it.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import os

WANTED = json.loads(os.environ["ORIGINALS"])

for module, names in WANTED["replaced"].items():
    for name, place in names.items():
        source, _, attribute = place.partition(":")
        replacement = getattr(importlib.import_module(source), attribute)
        setattr(importlib.import_module(module), name, replacement)


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if any(fnmatch.fnmatchcase(item.name, each) for each in WANTED["left_out"])]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
