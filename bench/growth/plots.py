"""The curves as SVG: readable on a white and on a dark page, and the same bytes for the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from growth import clients, model, server
from measure import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from growth.curves import Curve

INK = "#848d97"  # for text and axes: the background is transparent, and this grey stands out on white and on black
COLOURS = ("#d1495b", "#2e86c1", "#3f9b58", "#b7791f", "#8e63c7")
MARKERS = "os^Dv"
WIDTH, HEIGHT = 4.2, 3.1  # inches of one panel

# The panels of each picture: the axis, and the series that share it.
Panel = tuple[str, tuple[str, ...]]
PANELS: dict[str, tuple[Panel, ...]] = {
    "waiters": (
        ("server's time, µs", (server.HANDOVER, server.BEAT_ONE, server.QUEUE_UP, server.GIVE_UP, server.BEAT_ALL)),
        ("bytes a waiter", (server.BYTES_WAITER,)),
    ),
    "permits": (
        ("server's time, µs", (server.HANDOVER, server.PAIR, server.RENEWAL)),
        ("bytes a holder", (server.BYTES_HOLDER,)),
    ),
    "readers": (
        ("server's time, µs a reader", (server.ENTER, server.PAIR, server.RENEWAL)),
        ("bytes a holder", (server.BYTES_HOLDER,)),
    ),
    "names": (
        ("server's time, µs", (server.HANDOVER, server.BEAT_ONE, server.RENEWAL)),
        ("bytes a lock", (server.BYTES_HELD, server.BYTES_QUEUE, server.BYTES_FREE)),
    ),
    "processes": (
        ("sections a second", (clients.SECTIONS,)),
        ("a wait, ms", (clients.LONGEST_WAIT, clients.MIDDLE_WAIT)),
        ("server's time, µs a section", (clients.SECTION_MICROS,)),
    ),
    "connections": (("server's core, µs", (server.HANDOVER_CORE, server.BEAT_CORE)),),
    "one-client": (
        ("client's core, µs a heartbeat", (clients.BEAT_CPU,)),
        ("client's core, %", (clients.BEAT_SHARE,)),
    ),
}
LOG_VALUES = {"a wait, ms"}
LABELS = {
    server.HANDOVER: "handover", server.BEAT_ONE: "heartbeat of one waiter", server.QUEUE_UP: "queue up",
    server.GIVE_UP: "give up", server.BEAT_ALL: "heartbeat in a batch", server.PAIR: "acquire + release",
    server.RENEWAL: "renewal in a batch", server.ENTER: "enter after a writer",
    server.BYTES_HELD: "held", server.BYTES_FREE: "used lately", server.BYTES_QUEUE: "its queue, one waiter",
    clients.LONGEST_WAIT: "longest", clients.MIDDLE_WAIT: "median",
    server.HANDOVER_CORE: "handover and push", server.BEAT_CORE: "heartbeat of one waiter",
}  # fmt: skip


def draw(curves: Mapping[str, Curve], directory: Path) -> list[Path]:
    """Write a picture for each curve, and one for the model."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {
        "svg.hashsalt": "interlock", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
        "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK,
        "grid.alpha": 0.25, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8,
        "savefig.transparent": True, "lines.linewidth": 1.8, "lines.markersize": 4.5,
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, curve in curves.items():
        if name in PANELS:
            figure, axes = _figure(len(PANELS[name]))
            for axis, (label, names) in zip(axes, PANELS[name], strict=True):
                _panel(axis, curve, label, names)
            written.append(_save(figure, directory / f"{name}.svg"))
    figure, axes = _figure(2)
    _model(axes, model.Costs.of(curves))
    written.append(_save(figure, directory / "cluster.svg"))
    return written


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(WIDTH * panels, HEIGHT), squeeze=False)
    return figure, axes[0]


def _panel(axis: Any, curve: Curve, label: str, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        points = [(x, y) for x, y in zip(curve.sizes, curve.values(name), strict=True) if y is not None]
        axis.plot(*zip(*points, strict=True), color=COLOURS[i], marker=MARKERS[i], label=LABELS.get(name, name))
    _scale(axis, curve.sizes, log_values=label in LOG_VALUES)
    axis.set_xlabel(curve.of)
    axis.set_ylabel(label)
    if len(names) > 1:
        _legend(axis, len(names))


def _scale(axis: Any, sizes: Sequence[int], *, log_values: bool = False) -> None:
    axis.set_xscale("log")
    axis.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    if log_values:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: shown(value))
    else:
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _legend(axis: Any, count: int) -> None:
    """Above the panel, where it hides no line."""
    axis.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3 if count == 3 else 2, handlelength=1.6, columnspacing=1.2
    )


def _model(axes: Any, costs: model.Costs) -> None:
    sizes = [1_000, 3_000, 10_000, 30_000, 100_000]
    core, held = axes
    for i, nodes in enumerate((3, 6, 12)):
        loads = [model.Load(size, size * model.NAMES // model.CLIENTS, model.HOLD) for size in sizes]
        found = [model.Node(load, costs, nodes) for load in loads]
        style = {"color": COLOURS[i], "marker": MARKERS[i], "label": f"{nodes} nodes"}
        core.plot(sizes, [node.core * 100 for node in found], **style)
        held.plot(sizes, [node.connections for node in found], **style)
    for axis, limit, text in (
        (core, model.FULL * 100, f"{model.FULL:.0%}"), (held, model.MAXCLIENTS, "default maxclients")
    ):  # fmt: skip
        axis.axhline(limit, color=INK, linestyle="--", linewidth=1)
        axis.annotate(text, (sizes[0], limit), xytext=(0, -10), textcoords="offset points", fontsize=8)
        _scale(axis, sizes, log_values=True)
        axis.set_xlabel("clients, ten for each lock")
        _legend(axis, 3)
    core.set_ylabel("core of the fullest node, %")
    held.set_ylabel("its connections")


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")
    return path
