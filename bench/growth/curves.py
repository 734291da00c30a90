"""What is measured and shown: curves over a number of things, as plain data that a file can keep."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from measure import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Costs = dict[str, float | None]  # by series, for one size


@dataclass
class Series:
    """One line of a picture, one row of a table: a value for each size; None where it has no meaning."""

    name: str
    unit: str
    values: list[float | None]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass
class Curve:
    """What grows, in which sizes, and what that costs."""

    name: str
    what: str  # it says, of the number of `of`, what is measured
    of: str  # the things whose number grows
    sizes: list[int]
    series: list[Series] = field(default_factory=list)

    def values(self, series: str) -> list[float | None]:
        (found,) = [each.values for each in self.series if each.name == series]
        return found

    def at(self, series: str, size: int) -> float:
        """The value for one size."""
        value = self.values(series)[self.sizes.index(size)]
        assert value is not None, (series, size)
        return value

    def last(self, series: str) -> float:
        """The value for the largest size."""
        return self.at(series, self.sizes[-1])

    def markdown(self) -> str:
        """A table: a row for each series."""
        lines = [
            f"| {self.of} | {' | '.join(f'{size:,}' for size in self.sizes)} |",
            "|---" * (len(self.sizes) + 1) + "|",
        ]
        lines += [f"| {each.label} | {' | '.join(map(_cell, each.values))} |" for each in self.series]
        return "\n".join(lines)

    def table(self) -> Table:
        """The same for a terminal."""
        table = Table(box=None, show_edge=False, padding=(0, 1, 0, 0), header_style="dim", title_justify="left")
        table.add_column(self.of, width=58)
        for size in self.sizes:
            table.add_column(f"{size:,}", justify="right", width=9)
        for each in self.series:
            table.add_row(each.label, *map(_cell, each.values))
        return table

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Curve:
        return cls(**{**data, "series": [Series(**each) for each in data["series"]]})


def _cell(value: float | None) -> str:
    return "" if value is None else shown(value)


def over_sizes(
    sizes: list[int], rounds: int, measure: Callable[[int], Costs], tell: Callable[[], None]
) -> dict[str, list[float | None]]:
    """By series, the medians for each size: every size once in a round, so that a slow minute meets all of them."""
    found: dict[int, list[Costs]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size in sizes if number % 2 else reversed(sizes):
            found[size].append(measure(size))
            tell()
    names = dict.fromkeys(name for of_size in found.values() for one in of_size for name in one)

    def median(size: int, name: str) -> float | None:
        values = [value for one in found[size] if (value := one.get(name)) is not None]
        return statistics.median(values) if values else None

    return {name: [median(size, name) for size in sizes] for name in names}
