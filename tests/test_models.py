"""The benchmark on models that others wrote: what it calls a disagreement, and a whole run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import models
from benchmarks.models import Process, Row, Run
from benchmarks.worker import DiedError

THEIRS = Run([8.0, 4.0, 2.0], [3.0, -4.0, 0.0], milliseconds=[10.0, 20.0, 40.0])
OURS = replace(THEIRS, milliseconds=[11.0, 20.0, 60.0], served=6, served_backward=6, fallbacks=0)
BOTH = ((OURS, "ours"), (THEIRS, "PyTorch"))


def judge(ours: Run = OURS, theirs: Run = THEIRS, *, counted: bool = True) -> Row:
    return models.judge("gpt", ours, theirs, counted=counted)


class Scripted:
    """Stands in for a process: gives the answers it was given and notes what it was told."""

    def __init__(self, name: str, log: list[str], answers: Sequence[dict[str, Any]]) -> None:
        self._name, self._log, self._answers = name, log, list(answers)

    def tell(self, model: str, steps: int) -> None:
        self._log.append(f"{self._name} {model} {steps}")

    def hear(self) -> dict[str, Any]:
        return self._answers.pop(0)

    def stop(self) -> None:
        self._log.append(f"{self._name} stop")


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> tuple[Row, Any]:
    log: list[str] = []
    pair: Any = [Scripted("ours", log, ours), Scripted("theirs", log, theirs)]
    return models.compare("gpt", *pair, 2, counted=True), log


# ----------------------------------------------------------------------------------- comparison


def test_equal_runs_agree() -> None:
    row = judge()
    assert row.faults == []
    assert row.verdict == "agrees"
    assert row.loss_distance == row.logits_distance == 0


def test_the_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    assert judge().ratio == pytest.approx(1.1)  # of 1.1, 1.0 and 1.5
    assert judge(replace(OURS, milliseconds=[]), replace(THEIRS, milliseconds=[])).ratio is None


def test_losses_are_compared_at_every_step_relative_to_the_first() -> None:
    close = judge(replace(OURS, losses=[8.0, 4.0 + 0.9 * 8 * models.LOSS_TOLERANCE, 2.0]))
    assert close.loss_distance == pytest.approx(0.9 * models.LOSS_TOLERANCE)
    assert close.faults == []
    far = judge(replace(OURS, losses=[8.0, 4.0 - 1.1 * 8 * models.LOSS_TOLERANCE, 2.0]))
    assert [fault.split(",")[0] for fault in far.faults] == ["losses differ by 0.21%"]


def test_logits_are_compared_by_the_length_of_their_difference() -> None:
    close = judge(replace(OURS, logits=[3.0, -4.0, 4.9 * models.LOGITS_TOLERANCE]))
    assert close.logits_distance == pytest.approx(0.98 * models.LOGITS_TOLERANCE)
    assert close.faults == []
    far = judge(replace(OURS, logits=[3.0, -4.0, 5.1 * models.LOGITS_TOLERANCE]))
    assert "logits differ" in far.verdict
    both = judge(replace(OURS, losses=[9.0, 4.0, 2.0], logits=[3.0, 4.0, 0.0]))
    assert len(both.faults) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("who", ["ours", "PyTorch"])
def test_a_loss_that_is_no_number_is_found(value: float, who: str) -> None:
    bad = [8.0, value, 2.0]
    ours, theirs = (replace(r, losses=bad if who == n else r.losses) for r, n in BOTH)
    assert judge(ours, theirs).faults == [f"{who}: 1 losses, 0 logits are not finite"]


@pytest.mark.parametrize("who", ["ours", "PyTorch"])
def test_a_logit_that_is_no_number_is_found_outside_the_sample_too(who: str) -> None:
    ours, theirs = (replace(r, not_finite=int(who == n)) for r, n in BOTH)
    assert judge(ours, theirs).faults == [f"{who}: 0 losses, 1 logits are not finite"]


def test_what_is_the_same_number_in_both_is_no_agreement_if_it_is_nan() -> None:
    bad = {"losses": [math.nan] * 3, "logits": [math.nan] * 3, "not_finite": 3}
    assert len(judge(replace(OURS, **bad), replace(THEIRS, **bad)).faults) == 2


@pytest.mark.parametrize("served", [0, None])
def test_calls_must_be_served_where_they_can_be(served: int | None) -> None:
    idle = replace(OURS, served=served)
    assert judge(idle).faults == ["not one call was served"]
    assert judge(idle, counted=False).faults == []


# -------------------------------------------------------------------------------------- processes

FIRST = {"losses": [8.0, 4.0], "logits": [1.0], "not_finite": 0, "kernels": ["cudnn"]}


def test_processes_learn_at_once_and_are_timed_in_turns() -> None:
    counts = {"served": 4, "served_backward": 3, "fallbacks": 1}
    later = {"served": 9, "served_backward": 8, "fallbacks": 2}
    row, log = compare(
        [FIRST | counts, {"milliseconds": 3.0} | counts, {"milliseconds": 4.0} | later],
        [FIRST, {"milliseconds": 2.0}, {"milliseconds": 4.0}],
    )
    learning, rounds = log[:2], [log[2:4], log[4:]]
    assert learning == ["ours gpt 0", "theirs gpt 0"]
    assert rounds == [["ours gpt 2", "theirs gpt 2"], ["theirs gpt 2", "ours gpt 2"]]
    assert row.verdict == "agrees"
    assert row.ratio == 1.25
    assert row.ours and row.theirs
    assert (row.ours.served, row.ours.served_backward, row.ours.fallbacks) == (9, 8, 2)
    assert row.ours.milliseconds == [3.0, 4.0]
    assert row.theirs.served is None


def test_a_missing_package_is_named_and_no_fault() -> None:
    missing = {"missing": "timm is not installed"}
    row, _ = compare([missing], [missing])
    assert row.verdict == "skipped: timm is not installed"
    assert row.faults == []


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_is_a_fault(late: bool) -> None:
    failure = {"failure": "RuntimeError: no memory"}
    row, _ = compare([FIRST, failure] if late else [failure], [FIRST, {"milliseconds": 1.0}])
    assert row.verdict == "ours: RuntimeError: no memory"


def test_a_process_that_dies_is_found() -> None:
    process = Process(["--rounds", "0"], enabled=False)  # a usage error
    try:
        process.tell("gpt", 0)
        with pytest.raises(DiedError, match="exit code 2"):
            process.hear()
    finally:
        process.stop()


def test_the_trained_code_does_not_import_the_package() -> None:
    """Apart from what `import torch` itself loads, which the variable decides."""
    code = (
        "import sys, torch; before = set(sys.modules); import benchmarks.models;"
        "print(*set(sys.modules) - before)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=models.ROOT, capture_output=True, text=True, check=True
    )
    names = found.stdout.split()
    assert "benchmarks.models" in names
    assert [name for name in names if name.startswith("cudnn_mha")] == []


# -------------------------------------------------------------------------------------------- runs


def written(folder: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "models.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([Row("gpt", THEIRS, OURS)], 0),
        ([Row("gpt", THEIRS, OURS), Row("vit", skipped="skipped: timm is not installed")], 0),
        ([Row("gpt", THEIRS, OURS), Row("vit", faults=["ours: RuntimeError"])], 1),
        ([Row("gpt", THEIRS, OURS, math.nan, math.inf, faults=["ours: 1 losses"])], 1),
        ([Row("vit", skipped="skipped: timm is not installed")], 1),
    ],
)
def test_the_exit_code_the_table_and_the_file(
    rows: list[Row],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given = {row.model: row for row in rows}
    log: list[str] = []
    where = {"torch": "2", "device": "CPU"}
    monkeypatch.setattr(models, "Process", lambda *_, enabled: Scripted("p", log, [where]))
    monkeypatch.setattr(models, "compare", lambda model, *_, **__: given[model])
    chosen = [word for model in given for word in ("--model", model)]
    assert models.main(["--device", "cpu", "--out", str(tmp_path), *chosen]) == code
    assert log == ["p stop", "p stop"]
    printed = capsys.readouterr().out
    found = written(tmp_path)
    assert found["environment"] == where
    for row, record in zip(rows, found["rows"], strict=True):
        assert row.verdict.split(":")[0] in printed
        assert record["verdict"] == row.verdict
        assert record["loss_distance"] is None


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--model", "resnet"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        models.main(arguments)
    assert raised.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert models.main([]) == 1
    assert "NVIDIA GPU" in capsys.readouterr().err


def test_a_whole_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(models.ENABLED, "1")  # decided for each process, not inherited
    options = ["--device", "cpu", "--tiny", "--model", "gpt", "--rounds", "1"]
    assert models.main([*options, "--out", str(tmp_path)]) == 0
    assert "agrees" in capsys.readouterr().out
    (row,) = written(tmp_path)["rows"]
    assert len(row["ours"]["losses"]) == models.LEARNING_STEPS
    assert row["ours"]["losses"][-1] < row["ours"]["losses"][0]
    assert row["ours"]["losses"] == row["theirs"]["losses"]
    assert row["ours"]["kernels"] == row["theirs"]["kernels"] != []
    assert row["ours"]["served"] == 0
    assert row["theirs"]["served"] is None
    assert row["ratio"] > 0


@pytest.mark.gpu
def test_a_whole_run_on_the_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = models.main(["--model", "gpt", "--rounds", "2", "--out", str(tmp_path)])
    assert code == 0, capsys.readouterr().out
    (row,) = written(tmp_path)["rows"]
    assert row["ours"]["kernels"] == ["cudnn"]
    assert row["ours"]["served"] > 0
    assert row["ours"]["served_backward"] > 0
    assert row["ours"]["fallbacks"] == 0
