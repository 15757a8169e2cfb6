"""``python -m benchmarks.lengths``: training on a new length every time.

300 lengths, each called for the first time, forward and backward: this package with plans that
serve many lengths from the start (``TORCH_CUDNN_MHA_LENGTHS=bucketed``) and by its default
(``auto``), nothing on disk, and PyTorch's own cuDNN backend. Each is a process of its own.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import first_calls
from benchmarks.first_calls import Answer, FailedError, Shape

BATCH, HEADS, DIM = 2, 8, 64
LEAST, MOST = 129, 1024
COUNT = 300

RUNS = {
    "ours, bucketed": ("ours", {"CACHE_DIR": "off", "LENGTHS": "bucketed"}),
    "ours, auto": ("ours", {"CACHE_DIR": "off", "LENGTHS": "auto"}),
    "PyTorch's cuDNN": ("cudnn", {}),
}
"""Who computes, and with which variables."""


def drawn(count: int) -> list[Shape]:
    """Calls that differ in their length alone, no length twice, the same in every run."""
    lengths = random.Random(0).sample(range(LEAST, MOST + 1), count)
    return [Shape(BATCH, HEADS, length, DIM) for length in lengths]


def ratios(answers: Mapping[str, Answer]) -> dict[str, float]:
    """How many times as long as each of ours PyTorch takes in all."""
    total = {name: sum(answer.seconds) for name, answer in answers.items()}
    *ours, theirs = RUNS
    return {name: total[theirs] / total[name] for name in ours}


def text(answers: Mapping[str, Answer]) -> str:
    """The table."""
    first = next(iter(answers.values()))
    found = ratios(answers)
    lines = [
        first_calls.header(first.environment),
        f"{len(first.seconds)} lengths from {LEAST} to {MOST}, forward and backward, causal, "
        f"B {BATCH}, H {HEADS}, D {DIM}, bfloat16; seconds of all first calls together",
        "",
        f"{'':<18}{'seconds':>9}{'builds':>8}{'PyTorch / it':>14}{'error':>9}",
    ]
    for name, answer in answers.items():
        ratio = f"{found[name]:.1f}" if name in found else "-"
        lines.append(
            f"{name:<18}{sum(answer.seconds):>9.2f}{first_calls.count(answer.builds):>8}"
            f"{ratio:>14}{answer.error:>9.2g}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lengths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=COUNT, help="how many lengths")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args(arguments)
    if not 1 <= options.count <= MOST - LEAST + 1:
        parser.error(f"--count must be from 1 to {MOST - LEAST + 1}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 measured, 1 not."""
    options = parse(arguments)
    shapes = drawn(options.count)
    try:
        answers = {name: first_calls.ask(who, shapes, v) for name, (who, v) in RUNS.items()}
    except FailedError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 1
    found = first_calls.records(answers) | {"shapes": shapes, "ratios": ratios(answers)}
    first_calls.report(found, text(answers), options.out, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
