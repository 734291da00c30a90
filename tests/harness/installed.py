"""A plugin for pytest: fails the run unless the tests import the interlock of the environment INSTALLED_IN."""

import os
from pathlib import Path

import interlock


def pytest_configure() -> None:
    place = Path(interlock.__file__)
    assert place.is_relative_to(os.environ["INSTALLED_IN"]), f"the tests import {place}"
