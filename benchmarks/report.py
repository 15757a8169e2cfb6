"""Rows into a table, the goals, a file of all numbers and a plot."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import (
    NO_RIVALS,
    PEERS,
    PLAIN,
    Case,
    Direction,
    Row,
    drawn_lengths,
    flops,
    moved,
    rate,
    traffic,
)

LATE = 0.2
SHORT = {"forward": "fwd", "backward": "bwd", "both": "fwd+bwd"}
COLOURS = {
    "ours": "#76b900",
    "dropin": "#2a9d8f",
    "cudnn": "#1f4e9c",
    "fa2": "#d1495b",
    "efficient": "#8d8d8d",
    "frontend": "#f2a541",
    "fa4": "#7b3fa0",
    "paged": "#4c7a00",
    "varlen": "#e76f51",
    "flex": "#00a6d6",
    "copy": "#c4c4c4",
}
MARKERS = {
    "ours": "D",
    "dropin": "d",
    "cudnn": "o",
    "fa2": "s",
    "efficient": "v",
    "frontend": "^",
    "fa4": "P",
    "paged": "p",
    "varlen": "X",
    "flex": "h",
    "copy": "_",
}


@dataclass(frozen=True)
class Check:
    """One number that has a goal; ``value`` is None where it was not measured."""

    case: str
    direction: Direction
    quantity: str
    value: float | None
    goal: float
    at_least: bool

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "no data"
        met = self.value >= self.goal if self.at_least else self.value <= self.goal
        return "met" if met else "MISSED"


def quantile(values: Iterable[float], q: float) -> float:
    """The ``q`` quantile, linear between neighbours."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def milliseconds(row: Row, peer: str, q: float = 0.5) -> float | None:
    """A quantile of one call's time, the median by default."""
    timing = row.timings.get(peer)
    return quantile([m for m in timing.milliseconds if m is not None], q) if timing else None


def ratio(row: Row, above: str, below: str) -> float | None:
    """Median over the rounds of one peer's time divided by another's in the same round."""
    if above not in row.timings or below not in row.timings:
        return None
    pairs = zip(row.timings[above].milliseconds, row.timings[below].milliseconds, strict=True)
    both = [a / b for a, b in pairs if a is not None and b is not None]
    return statistics.median(both) if both else None


def ratios(row: Row) -> dict[str, float]:
    """How many times as long as we each rival takes."""
    rivals = [peer for peer in row.case.peers if peer not in NO_RIVALS]
    found = {peer: ratio(row, peer, "ours") for peer in rivals}
    return {peer: value for peer, value in found.items() if value is not None}


def shares(row: Row) -> dict[str, float]:
    """Which part of the bandwidth of a copy each peer reaches."""
    found = {}
    for peer in row.timings:
        value = ratio(row, "copy", peer)
        if value is not None and peer != "copy":
            found[peer] = value * moved(row.case, peer) / moved(row.case, "copy")
    return found


def checks(rows: Iterable[Row]) -> list[Check]:
    """What was measured against the goals."""
    found = []
    for row in rows:
        name = row.case.name
        slower, faster = ratio(row, "ours", "cudnn"), ratio(row, "fa2", "ours")
        if row.case.host or row.case.group == "dense":
            goal = 1.03 if not row.case.host else 1.2 if row.direction == "forward" else 1.1
            found.append(Check(name, row.direction, "ours / cudnn", slower, goal, False))
        if row.case.host:
            goal = 1.35 if row.direction == "forward" else 1.1
            dropin = ratio(row, "dropin", "cudnn")
            found.append(Check(name, row.direction, "dropin / cudnn", dropin, goal, False))
        if row.case.group == "dense" and row.case.dim == 128 and row.case.causal:
            found.append(Check(name, row.direction, "fa2 / ours", faster, 1.6, True))
    return found


# ----------------------------------------------------------------------------------------- text


def header(environment: Mapping[str, str], cases: Sequence[Case]) -> str:
    """What was measured on, and how to read the table."""
    lines = [f"{name}: {value}" for name, value in environment.items()]
    lines += [
        f"{name}: {peer}"
        for name, peer in PEERS.items()
        if any(name in case.peers for case in cases)
    ]
    for case in cases:
        if case.layout in ("padded", "packed"):
            lengths = drawn_lengths(case)
            lines.append(
                f"padded, packed: {len(lengths)} lengths from {min(lengths)} to {max(lengths)}, "
                f"mean {statistics.mean(lengths):.0f}"
            )
            break
    device = [traffic(case) for case in cases if not case.host]
    if device:
        lines.append(
            f"L2 is not flushed: the tensors of each device case take {min(device) / 2**20:.0f} "
            "MiB or more, so that a call finds little of them there"
        )
    lines.append(
        "ms, us: median of one call; +-: half the distance of the 20 % and 80 % quantiles; '!': "
        f"in over {LATE:.0%} of the rounds the GPU may have waited for the host"
    )
    lines.append(
        "columns of peers: TFLOP/s (one query: GB/s; host: us), padding not counted; o/c, o/p: "
        "time ours / cudnn, / the first other peer of the case"
    )
    return "\n".join(lines)


def titles(columns: Sequence[str]) -> str:
    """The first line of a table."""
    names = "".join(f"{name:>10}" for name in columns)
    last = "o/c" if columns == PLAIN else "o/p"
    return f"\n{'case':<30}{'':<7}{'ours':>9}{'+-':>6}{names}{last:>7}"


def table_row(row: Row) -> str:
    """One line of the table."""
    start = f"{row.case.name:<30}{SHORT[row.direction]:<7}"
    if row.failure:
        return f"{start} FAILED: {row.failure[:300]}"
    factor, unit = (1e3, "us") if row.case.host else (1, "ms")
    middle, low, high = (milliseconds(row, "ours", q) for q in (0.5, 0.2, 0.8))
    if middle is None or low is None or high is None:
        start += f"{'-':>9}{'-':>6}"
    else:
        start += f"{middle * factor:>7.4g}{unit}{(high - low) / middle / 2:>6.1%}"
    for peer in row.case.columns:
        time = milliseconds(row, peer)
        if time is None:
            start += f"{'-':>10}"
            continue
        value = time * factor if row.case.host else rate(row.case, row.direction, time, peer)
        start += f"{value:>10.1f}" if row.timings[peer].late <= LATE else f"{value:>9.1f}!"
    against = ratio(row, "ours", row.case.rival)
    return start + ("      -" if against is None else f"{against:>7.3f}")


def notes(rows: Iterable[Row]) -> str:
    """Why peers are missing, each reason once."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer, reason in row.refused.items():
            names = where.setdefault((peer, reason), [])
            if row.case.name not in names:
                names.append(row.case.name)
    lines = []
    for (peer, reason), names in where.items():
        others = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"{peer}: {reason[:200]} [{', '.join(names[:2])}{others}]")
    return "\n".join(lines)


def comparison(rows: Iterable[Row]) -> str:
    """What the cases of our further arguments come to, the peers of each as there are."""
    lines = []
    for row in rows:
        parts = [f"{peer} {value:.2f}" for peer, value in ratios(row).items()]
        parts += [f"{peer} {value:.0%} of a copy" for peer, value in shares(row).items()]
        if row.case.extended and parts:
            lines.append(f"{row.case.name:<30}{SHORT[row.direction]:<7}{', '.join(parts)}")
    if lines:
        lines.insert(0, "time of a peer / ours, and bandwidth as a part of that of a copy")
    return "\n".join(lines)


def summary(found: Sequence[Check]) -> str:
    """The goals as a table."""
    grouped: dict[tuple[str, str], list[Check]] = {}
    for check in found:
        grouped.setdefault((check.case, check.quantity), []).append(check)
    lines = ["goals: a ratio of times, its bound, the verdict"]
    for (case, quantity), some in grouped.items():
        line = f"{case:<30}{quantity:<13}"
        for check in some:
            value = "-" if check.value is None else f"{check.value:.3f}"
            bound = f"{'>=' if check.at_least else '<='} {check.goal:g}"
            line += f"{SHORT[check.direction]:>8} {value} {bound} {check.verdict}"
        lines.append(line)
    met = sum(check.verdict == "met" for check in found)
    return "\n".join([*lines, f"{met} of {len(found)} met"])


# ---------------------------------------------------------------------------------------- files


def write_json(
    path: Path, environment: Mapping[str, str], options: Mapping[str, object], rows: Sequence[Row]
) -> None:
    """Every number, with the work of each row and the goals."""
    records = []
    for row in rows:
        record: dict[str, Any] = {"name": row.case.name, **dataclasses.asdict(row)}
        record |= {"flops": flops(row.case, row.direction), "bytes": traffic(row.case)}
        record |= {"ratios": ratios(row), "shares": shares(row)}
        records.append(record)
    found = [{**dataclasses.asdict(check), "verdict": check.verdict} for check in checks(rows)]
    whole = {"environment": environment, "options": options, "rows": records, "checks": found}
    path.write_text(json.dumps(whole, indent=1) + "\n")


def plot(path: Path, environment: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Speed of every device row, decode's bandwidth and the host times.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    device = [r for r in rows if not r.case.host and r.case.unit == "TFLOP/s"]
    names = list(dict.fromkeys(row.case.name for row in device))
    height = 0.28 * len(names) + 1.5
    figure = pyplot.figure(figsize=(13, height + 3.2), layout="constrained")
    panels = figure.add_gridspec(2, 2, height_ratios=(height, 2.4))
    for column, direction in enumerate(("forward", "backward")):
        axes = figure.add_subplot(panels[0, column])
        for peer in PEERS:
            at, speed = [], []
            for row in device:
                time = milliseconds(row, peer)
                if row.direction == direction and time is not None:
                    at.append(names.index(row.case.name))
                    speed.append(rate(row.case, row.direction, time))
            if speed:
                style: dict[str, Any] = {"s": 60 if peer == "ours" else 34, "alpha": 0.85}
                style |= {"marker": MARKERS[peer], "color": COLOURS[peer]}
                axes.scatter(speed, at, zorder=2 if peer == "ours" else 3, **style)
        axes.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
        axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_title(f"{direction}, TFLOP/s")
        axes.grid(alpha=0.3)
    host = [row for row in rows if row.case.host]
    decode = [row for row in rows if row.case.unit == "GB/s"]
    _bars(figure.add_subplot(panels[1, 0]), host, "host time of one call, microseconds")
    _bars(figure.add_subplot(panels[1, 1]), decode, "one query, GB/s")
    seen = [peer for peer in PEERS if any(peer in row.timings for row in rows)]
    handles = [
        Line2D([], [], ls="", marker=MARKERS[peer], color=COLOURS[peer], label=PEERS[peer])
        for peer in seen
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(PLAIN))
    figure.suptitle(
        f"{environment.get('GPU', '')}; torch {environment.get('torch', '')}; "
        f"cuDNN {environment.get('cuDNN', '')}; {environment.get('date', '')}"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[Row], title: str) -> None:
    """A group of bars for each row, one bar for each peer."""
    width = 0.8 / len(PLAIN)
    for index, row in enumerate(rows):
        present = [peer for peer in PEERS if peer in row.timings]
        for place, peer in enumerate(present):
            time = milliseconds(row, peer)
            assert time is not None
            host = row.case.host
            value = time * 1e3 if host else rate(row.case, row.direction, time, peer)
            at = index + (place - (len(present) - 1) / 2) * width
            axes.bar(at, value, width, color=COLOURS[peer])
            axes.text(at, value, f"{value:.0f}", ha="center", va="bottom", fontsize=6)
    labels = [f"{row.case.name}\n{SHORT[row.direction]}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_xlim(-0.6, max(len(rows), 2) - 0.4)
    axes.margins(y=0.15)
    axes.set_title(title)
