"""``python -m benchmarks.coldstart``: what plans on disk are worth to a new process.

One process calls 50 shapes, forward and backward, and fills a cache folder with their plans. A
second one finds the folder and calls the same shapes, each for the first time; a third one calls
them in PyTorch's own cuDNN backend, which keeps nothing on disk.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import first_calls
from benchmarks.first_calls import Answer, FailedError, Shape

COUNT = 50
ALL = [
    Shape(b, h, s, d)
    for b, h, s, d in itertools.product((1, 2, 3, 4), (8, 16), (256, 777, 1024), (64, 128))
]
ALL += [Shape(b, 32, 512, 64) for b in (1, 2)]
"""At most three lengths of otherwise equal calls, so that each gets a plan of its own."""

FILL, WARM, THEIRS = "ours, empty folder", "ours, full folder", "PyTorch's cuDNN"
WHO = {FILL: "ours", WARM: "ours", THEIRS: "cudnn"}


def drawn(count: int) -> list[Shape]:
    """Shapes in an order that is the same in every run."""
    return random.Random(0).sample(ALL, count)


def ratio(above: Answer, below: Answer) -> float:
    """Median over the shapes of one's time divided by the other's."""
    pairs = zip(above.seconds, below.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def text(answers: Mapping[str, Answer]) -> str:
    """The table."""
    first = next(iter(answers.values()))
    lines = [
        first_calls.header(first.environment),
        f"first calls of {len(first.seconds)} shapes, forward and backward, causal, bfloat16",
        "",
        f"{'':<20}{'median ms':>11}{'total s':>9}{'builds':>8}{'loads':>7}"
        f"{'PyTorch / it':>14}{'error':>9}",
    ]
    for name, answer in answers.items():
        against = "-" if name == THEIRS else f"{ratio(answers[THEIRS], answer):.1f}"
        lines.append(
            f"{name:<20}{statistics.median(answer.seconds) * 1e3:>11.2f}{sum(answer.seconds):>9.2f}"
            f"{first_calls.count(answer.builds):>8}{first_calls.count(answer.loads):>7}"
            f"{against:>14}{answer.error:>9.2g}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coldstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=COUNT, help="how many shapes")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args(arguments)
    if not 1 <= options.count <= len(ALL):
        parser.error(f"--count must be from 1 to {len(ALL)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 measured, 1 not, or the full folder did not spare every build."""
    options = parse(arguments)
    shapes = drawn(options.count)
    try:
        with tempfile.TemporaryDirectory(prefix="cudnn_mha") as folder:
            variables = {"CACHE_DIR": folder}
            answers = {name: first_calls.ask(who, shapes, variables) for name, who in WHO.items()}
    except FailedError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 1
    found = first_calls.records(answers) | {
        "shapes": shapes,
        "ratios": {name: ratio(answers[THEIRS], answers[name]) for name in (FILL, WARM)},
    }
    first_calls.report(found, text(answers), options.out, as_json=options.json)
    if builds := answers[WARM].builds:
        print(f"{builds} plans were compiled in spite of the full folder", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
