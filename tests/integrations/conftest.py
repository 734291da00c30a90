"""What the tests of the two demos share. Each of their modules says by FAULTY and CALM with which options it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.demos import Rows, rows, start
from interlock.embedded import Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def embedded_server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> tuple[Rows, Rows]:
    """All recipes with faults and without, at the same time: both runs mostly wait."""
    faulty, calm = (start("demo", *options.split()) for options in (request.module.FAULTY, request.module.CALM))
    return rows(faulty), rows(calm)


@pytest.fixture
def faulty(runs: tuple[Rows, Rows]) -> Rows:
    """The rows of the run with faults, by recipe."""
    return runs[0]


@pytest.fixture
def calm(runs: tuple[Rows, Rows]) -> Rows:
    """The rows of the run without faults, by recipe."""
    return runs[1]
