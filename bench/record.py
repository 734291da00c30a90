"""The recorded run: docs/benchmarks.json, of which the pages take every figure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from checkouts import ROOT
from measure import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NUMBERS: Final = ROOT / "docs" / "benchmarks.json"


@dataclass
class Recorded(Outcome):
    """An outcome of the record: what an Outcome computes of the rounds, the record has already."""

    stored: Mapping[str, Any] = field(default_factory=dict)  # by contender

    def median(self, contender: str) -> float:
        return float(self.stored[contender]["median"])

    def ratio(self, contender: str) -> float:
        return float(self.stored[contender]["ours_over_this"])

    def spread(self, contender: str) -> tuple[float, float]:
        low, high = self.stored[contender]["spread"]
        return low, high

    def tail(self, contender: str) -> tuple[float, float, float] | None:
        latency = self.stored[contender]["latency"]
        return (latency["p50"], latency["p99"], latency["max"]) if latency else None


def as_json(outcomes: Iterable[Outcome], about: Mapping[str, object]) -> dict[str, Any]:
    return {"about": dict(about), "rows": [outcome.as_json() for outcome in outcomes]}


def outcomes_of(numbers: Mapping[str, Any]) -> list[Recorded]:
    return [_outcome(row) for row in numbers["rows"]]


def _outcome(row: Mapping[str, Any]) -> Recorded:
    stored = row["contenders"]
    shares = {name: each["least_share_of_a_thread"] for name, each in stored.items()}
    return Recorded(
        row["row"], row["what"], row["unit"], row["ours"],
        samples={name: each["rounds"] for name, each in stored.items()},
        checks=[Check(**check) for check in row["checks"]],
        remarks={name: each["remark"] for name, each in stored.items() if each["remark"]},
        latencies={name: [*each["latency"].values()] for name, each in stored.items() if each["latency"]},
        latency=row["latency"], latency_unit=row["latency_unit"],
        starving={name: share for name, share in shares.items() if share is not None},
        note=row["note"], less_is_better=row["less_is_better"], not_peers=tuple(row["not_peers"]), stored=stored,
    )  # fmt: skip


def read() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(NUMBERS.read_text(encoding="utf-8"))
    return numbers


def text_of(numbers: Mapping[str, Any]) -> str:
    return json.dumps(numbers, indent=1, ensure_ascii=False) + "\n"


def write(numbers: Mapping[str, Any]) -> None:
    NUMBERS.write_text(text_of(numbers), encoding="utf-8")
