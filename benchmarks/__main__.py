"""``python -m benchmarks``: compares `cudnn_sdpa` with its peers; see ``--help``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.cases import CASES, EXTENDED, PEERS, Row
from benchmarks.worker import DiedError, run

FULL = {"seconds": 2.0, "repeats": 50}
QUICK = {"seconds": 0.6, "repeats": 15}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few cases, few rounds")
    parser.add_argument(
        "--only",
        metavar="WHAT",
        default="plain",
        help="'plain': what PyTorch's function can say, too (default); 'extended': what takes "
        "our further arguments and functions; 'all': both; "
        "else a regular expression that is found in the names of the wanted cases",
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the files")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--repeats", type=int, help="most rounds for each direction of a case")
    parser.add_argument("--seconds", type=float, help="for the rounds of each case")
    options = parser.parse_args(arguments)
    for name, default in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, type(default)(default))
        elif getattr(options, name) <= 0:
            parser.error(f"--{name} must be positive")
    try:
        pattern = re.compile(options.only)
    except re.error as error:
        parser.error(f"--only is no regular expression: {error}")
    named = {"plain": CASES, "extended": EXTENDED, "all": CASES + EXTENDED}
    wanted = named.get(options.only) or [
        case for case in CASES + EXTENDED if pattern.search(case.name)
    ]
    options.cases = [case for case in wanted if case.quick or not options.quick]
    if not options.cases:
        parser.error("no case has such a name; --list names them all")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 measured, 1 no GPU, 2 measured with failures."""
    options = parse(arguments)
    if options.list:
        for case in options.cases:
            print(
                f"{case.name:<31} B={case.batch} Hq={case.heads} Hkv={case.kv_heads}"
                f"{'  quick' if case.quick else ''}"
            )
        print("peers: " + ", ".join(f"{name} = {peer}" for name, peer in PEERS.items()))
        return 0
    start = time.monotonic()
    rows: list[Row] = []
    shown: list[tuple[str, ...]] = []
    environment: dict[str, str] = {}

    def begin(found: dict[str, str]) -> None:
        environment.update(found)
        options.out.mkdir(parents=True, exist_ok=True)
        print(report.header(found, options.cases), flush=True)

    def done(new: list[Row]) -> None:
        rows.extend(new)
        for row in new:
            if not shown or shown[-1] != row.case.columns:
                shown.append(row.case.columns)
                print(report.titles(row.case.columns))
            print(report.table_row(row), flush=True)
        settings = {"seconds": options.seconds, "repeats": options.repeats, "quick": options.quick}
        report.write_json(options.out / "benchmarks.json", environment, settings, rows)

    try:
        started = run(options.cases, options.seconds, options.repeats, begin, done)
    except DiedError as error:
        print(f"nothing can be measured: {error}", file=sys.stderr)
        return 1
    if not started:
        print("the benchmarks need an NVIDIA GPU that torch can use; none is here", file=sys.stderr)
        return 1
    if text := report.notes(rows):
        print(f"\nnot measured:\n{text}")
    if text := report.comparison(rows):
        print(f"\n{text}")
    if found := report.checks(rows):
        print(f"\n{report.summary(found)}")
    try:
        report.plot(options.out / "benchmarks.png", environment, rows)
    except Exception as error:  # the numbers are safe already
        print(f"no plot: {type(error).__name__}: {error}")
    failed = sum(row.failure is not None for row in rows)
    print(f"\n{time.monotonic() - start:.0f} s; files in {options.out}; {failed} failures")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
