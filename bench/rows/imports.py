"""The cost of a cold import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from measure import Bench, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST = "import interlock, and the first Interlock"


def imports(bench: Bench) -> Iterator[Outcome]:
    """Each in a fresh interpreter, whose own start is not counted; all find compiled files."""
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def of(statement: str) -> Callable[[], float]:
            code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"

            def slice_() -> float:
                command = [sys.executable, "-c", code]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                return float(done.stdout) * 1000

            return slice_

        statements = {f"import {module}": f"import {module}" for module in ("interlock", "interlock.aio", "redis")}
        statements[FIRST] = "from interlock import Interlock; Interlock('redis://localhost')"
        samples = bench.interleave("import", 15, {name: of(statement) for name, statement in statements.items()})
    yield Outcome(
        "import", "cold import", "ms", "import interlock", samples, less_is_better=True,
        note="interlock imports redis-py with the first Interlock that is made.",
    )  # fmt: skip
