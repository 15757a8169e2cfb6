"""The benchmarks of first calls, as far as no GPU is needed: processes and tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import coldstart, first_calls, lengths
from benchmarks.first_calls import Answer, FailedError, Shape

STUB = """
import json, os, sys
shapes = json.load(sys.stdin)
names = sorted(name for name in os.environ if name.startswith("TORCH_CUDNN_MHA_"))
print("something that a library says")
print(json.dumps({
    "seconds": [shape[2] / 1000 for shape in shapes], "builds": 3, "loads": None, "error": 0.001,
    "environment": {"who": sys.argv[1], "names": ",".join(names)},
}))
"""
SHAPES = [Shape(2, 4, seq, 64) for seq in (33, 40, 64)]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_MHA_ENABLED", "1")
    answer = first_calls.ask("ours", SHAPES, {"CACHE_DIR": "off"}, python(STUB))
    assert answer.seconds == [0.033, 0.04, 0.064]
    assert (answer.builds, answer.loads) == (3, None)
    assert answer.environment == {"who": "ours", "names": "TORCH_CUDNN_MHA_CACHE_DIR"}
    assert os.environ["TORCH_CUDNN_MHA_ENABLED"] == "1"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('a\\nb', file=sys.stderr); sys.exit(3)", "ours: b"),
        ("import os; os._exit(5)", "ours: exit code 5"),
        ("print('hello')", "ours: no answer but 'hello"),
        ("", "ours: no answer but ''"),
        (STUB.replace("0.001", "0.5"), "wrong values, relative error 0.5"),
        (STUB.replace("0.001", "float('nan')"), "wrong values, relative error nan"),
    ],
)
def test_a_process_that_fails(code: str, message: str) -> None:
    with pytest.raises(FailedError, match=message):
        first_calls.ask("ours", SHAPES, {}, python(code))


def test_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_calls, "PATIENCE", 0.1)
    with pytest.raises(FailedError, match=r"no answer within 0\.1 s"):
        first_calls.ask("ours", SHAPES, {}, python("import time; time.sleep(60)"))


@pytest.mark.parametrize("who", ["ours", "cudnn"])
def test_measure(who: str) -> None:
    answer = first_calls.measure(who, SHAPES, "cpu")
    assert len(answer.seconds) == 3 and min(answer.seconds) > 0
    assert 0 < answer.error < 0.01
    expected = (0, 0) if who == "ours" else (None, None)
    assert (answer.builds, answer.loads) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("module", [lengths, coldstart])
def test_no_gpu(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main(["--count", "1"]) == 1
    assert capsys.readouterr().err == f"nothing was measured: ours: {first_calls.NO_GPU}\n"


def answers(monkeypatch: pytest.MonkeyPatch, builds: int = 0) -> list[tuple[str, dict[str, str]]]:
    """Answers every question: the first process takes 4 s a shape, then 1 s, then 2 s."""
    asked: list[tuple[str, dict[str, str]]] = []

    def ask(who: str, shapes: Sequence[Shape], variables: Mapping[str, str]) -> Answer:
        seconds = [4.0, 1.0, 2.0][len(asked)]
        asked.append((who, dict(variables)))
        known = builds if who == "ours" else None
        return Answer([seconds] * len(shapes), known, known, 0.001, {"GPU": "made up"})

    monkeypatch.setattr(first_calls, "ask", ask)
    return asked


def test_lengths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers(monkeypatch, 6)
    assert lengths.main(["--out", str(tmp_path / "sub" / "x.json")]) == 0
    assert asked == [
        ("ours", {"CACHE_DIR": "off", "LENGTHS": "bucketed"}),
        ("ours", {"CACHE_DIR": "off", "LENGTHS": "auto"}),
        ("cudnn", {}),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "GPU: made up" in lines
    assert lines[-3].split() == ["ours,", "bucketed", "1200.00", "6", "0.5", "0.001"]
    assert lines[-1].split()[-4:] == ["600.00", "-", "-", "0.001"]
    whole = json.loads((tmp_path / "sub" / "x.json").read_text())
    assert whole["ratios"] == {"ours, bucketed": 0.5, "ours, auto": 2.0}
    assert whole["runs"]["ours, auto"]["builds"] == 6
    drawn = [shape[2] for shape in whole["shapes"]]
    assert len(set(drawn)) == 300 and 129 <= min(drawn) and max(drawn) <= 1024
    assert {(b, h, d) for b, h, _, d in whole["shapes"]} == {(2, 8, 64)}


@pytest.mark.parametrize(("builds", "code"), [(0, 0), (2, 1)])
def test_coldstart(
    builds: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers(monkeypatch, builds)
    assert coldstart.main(["--json"]) == code
    assert [who for who, _ in asked] == ["ours", "ours", "cudnn"]
    folder = asked[0][1]["CACHE_DIR"]
    assert asked[1][1] == {"CACHE_DIR": folder} and not Path(folder).exists()
    output = capsys.readouterr()
    whole = json.loads(output.out)
    assert whole["ratios"] == {"ours, empty folder": 0.5, "ours, full folder": 2.0}
    assert len({tuple(shape) for shape in whole["shapes"]}) == 50
    assert ("2 plans were compiled" in output.err) == bool(builds)


def test_coldstart_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch)
    assert coldstart.main(["--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = ["ours,", "full", "folder", "1000.00", "2.00", "0", "0", "2.0", "0.001"]
    assert lines[-2].split() == cells


def test_no_length_of_coldstart_shares_a_plan() -> None:
    from cudnn_mha.lengths import FEW

    met: dict[tuple[int, int, int], set[int]] = {}
    for b, h, s, d in coldstart.ALL:
        met.setdefault((b, h, d), set()).add(s)
    assert max(map(len, met.values())) <= FEW
    assert len(coldstart.ALL) == len(set(coldstart.ALL)) >= coldstart.COUNT


@pytest.mark.parametrize("module", [lengths, coldstart])
@pytest.mark.parametrize("count", ["0", "9999"])
def test_counts(module: Any, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module.main(["--count", count])
    assert "--count must be from 1 to" in capsys.readouterr().err
