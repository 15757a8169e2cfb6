"""The benchmarks, as far as no GPU is needed: work, turns, checks of values, report, processes."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import peers, report, timing, worker
from benchmarks.cases import (
    CASES,
    EXTENDED,
    PEERS,
    PLAIN,
    Case,
    Direction,
    Row,
    Timing,
    flops,
    key_lengths,
    rate,
    traffic,
    visible_pairs,
)
from benchmarks.data import Data, make_data

SMALL = Case("dense", 2, 4, 4, 33, 33, 64, causal=True)
DROPOUT = Case("dropout", 8, 16, 16, 64, 64, 64, dropout=0.1)
DENSE = Case("dense", 4, 16, 16, 4096, 4096, 128, causal=True)
DECODE = Case("decode", 64, 32, 8, 1, 8192, 128, backward=False)


def row(case: Case = DENSE, direction: Direction = "forward", **times: float) -> Row:
    """A row in which each peer took the same time in all of five rounds."""
    return Row(case, direction, {peer: Timing([ms] * 5, 1) for peer, ms in times.items()})


# ----------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize(
    "case",
    [
        Case("x", 3, 1, 1, 5, 7, 8),
        Case("x", 3, 1, 1, 5, 7, 8, causal=True),
        Case("x", 3, 1, 1, 7, 5, 8, causal=True),
        Case("x", 3, 1, 1, 16, 16, 8, mask="keys"),
        Case("x", 3, 1, 1, 16, 16, 8, mask="full"),
    ],
    ids=str,
)
def test_visible_pairs(case: Case) -> None:
    lengths = key_lengths(case) if case.mask == "keys" else [case.seq_kv] * case.batch
    counted = sum(
        j < length and (not case.causal or j <= i)
        for length in lengths
        for i in range(case.seq_q)
        for j in range(case.seq_kv)
    )
    assert visible_pairs(case) == counted


def test_key_lengths_reach_from_an_eighth_to_all() -> None:
    assert key_lengths(Case("x", 3, 1, 1, 16, 16, 8)) == [2, 9, 16]
    assert key_lengths(Case("x", 1, 1, 1, 16, 16, 8)) == [2]


def test_work_and_rate() -> None:
    full = dataclasses.replace(DENSE, causal=False)
    assert flops(full, "forward") == 4 * 4 * 16 * 4096**2 * 128
    assert flops(full, "backward") == 2.5 * flops(full, "forward")
    assert flops(DENSE, "forward") == 4 * 4 * 16 * (4096 * 4097 // 2) * 128
    assert rate(full, "forward", 1.0) == pytest.approx(flops(full, "forward") / 1e9)
    assert traffic(DECODE) == 2 * 64 * 128 * (2 * 32 + 2 * 8 * 8192)
    assert DECODE.unit == "GB/s"
    assert rate(DECODE, "forward", 0.5) == pytest.approx(traffic(DECODE) / 0.5e-3 / 1e9)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seq", [1024, 4096, 16384])
@pytest.mark.parametrize("causal", [True, False])
def test_dense_shapes(dim: int, seq: int, causal: bool) -> None:
    (case,) = (
        c for c in CASES if (c.group, c.dim, c.seq_q, c.causal) == ("dense", dim, seq, causal)
    )
    assert case.batch * case.seq_q == 16384
    assert case.heads * case.dim == 2048


def test_the_cases_cover_what_is_promised() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.mask for case in CASES} == {None, "keys", "full"}
    assert any((case.heads, case.kv_heads) == (32, 8) and case.backward for case in CASES)
    assert any(case.seq_q == 1 and case.gqa for case in CASES)
    assert any(case.seq_q == 777 for case in CASES)
    assert any(case.dropout == 0.1 for case in CASES)
    assert min(traffic(case) for case in CASES if not case.host) >= 2**27
    assert {case.group for case in CASES if case.quick} >= {"dense", "gqa", "decode", "host"}


# ------------------------------------------------------------------------------------- in turns


def test_schedule() -> None:
    seconds = {"a": 1e-3, "b": 0.5e-3, "slow": 50e-3}
    turns = timing.schedule(seconds, budget=0.33, repeats=50, sample=2e-3)
    # A mean round takes 2 + 2 + 50 / 4 ms.
    assert len(turns) == 20
    assert turns[0] == [("a", 2), ("b", 4), ("slow", 1)]
    assert turns[1] == [("b", 4), ("a", 2)]
    assert turns[4] == [("b", 4), ("slow", 1), ("a", 2)]
    assert [any(n == "slow" for n, _ in t) for t in turns[:8]] == [True, False, False, False] * 2


def test_schedule_is_bounded() -> None:
    def rounds(budget: float, repeats: int) -> int:
        return len(timing.schedule({"a": 1e-3}, budget=budget, repeats=repeats, sample=1e-3))

    assert rounds(100, 7) == 7
    assert rounds(0.001, 50) == timing.LEAST_ROUNDS
    assert timing.schedule({"a": 1e-9}, budget=1, repeats=1, sample=1) == [
        [("a", timing.MOST_CALLS)]
    ]


def test_interleave() -> None:
    seen = []

    def clock(turn: timing.Turn) -> dict[str, tuple[float, bool]]:
        seen.append(turn)
        return {name: (calls * 10.0 + len(seen), len(seen) == 1) for name, calls in turn}

    turns: list[timing.Turn] = [[("a", 2), ("b", 1)], [("a", 2)]]
    timings = timing.interleave(turns, clock)
    assert seen == turns
    assert timings["a"] == Timing([10.5, 11.0], 2, late=0.5)
    assert timings["b"] == Timing([11.0, None], 1, late=1.0)


def test_run_case_reports_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(steps: dict[str, Callable[[], object]], direction: str) -> timing.Clock:
        def one(turn: timing.Turn) -> dict[str, tuple[float, bool]]:
            for name, calls in turn:
                with peers.only(name, direction):
                    for _ in range(calls):
                        steps[name]()
            return {name: (float(calls), False) for name, calls in turn}

        return one

    monkeypatch.setattr(timing, "device_clock", clock)
    monkeypatch.setattr(timing, "make_data", lambda case: make_data(case, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = timing.run_case(SMALL, 0.01, 3)
    assert [r.direction for r in rows] == ["forward", "backward"]
    for found in rows:
        assert found.failure is None
        assert found.timings["fa2"].milliseconds == [1.0, 1.0, 1.0]
        assert found.timings["fa2"].error < peers.TOLERANCE
        assert "CUDA" in found.refused["ours"]
        assert set(found.timings) | set(found.refused) == set(PLAIN)


def test_a_peer_that_takes_long_to_prepare_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(name: str, *_: object) -> None:
        raise peers.RefusedError("asked")

    monkeypatch.setattr(timing, "make_data", lambda case: None)
    monkeypatch.setattr(timing, "prepare", prepare)
    monkeypatch.setattr(timing, "_preparing", dict.fromkeys(PEERS, 31.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (found, _) = timing.run_case(SMALL, 2.0, 3)
    assert found.refused["ours"] == found.refused["cudnn"] == "asked"
    assert found.refused["fa4"] == "sits out: its preparation takes too long"
    assert timing.run_case(SMALL, 3.0, 3)[0].refused["fa4"] == "asked"


def test_run_case_keeps_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case) -> Data:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(timing, "make_data", broken)
    rows = timing.run_case(SMALL, 0.01, 3)
    assert [r.failure for r in rows] == ["RuntimeError: out of luck"] * 2


# ---------------------------------------------------------------------------------------- peers


def bound(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(peers, "bind", lambda *_: call)


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Case("mask", 3, 2, 2, 40, 40, 64, mask="keys"),
        Case("mask", 3, 2, 2, 40, 40, 64, mask="full"),
        Case("gqa", 2, 4, 2, 1, 40, 64, backward=False),
    ],
    ids=str,
)
def test_reference_agrees_with_float32(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data(case, "cpu")
    assert len(data.expected) == (4 if case.backward else 1)

    def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = q.float(), k.float(), v.float()
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
        options = {"is_causal": case.causal, "enable_gqa": case.gqa}
        return F.scaled_dot_product_attention(q, k, v, mask, **options).bfloat16()

    bound(monkeypatch, exact)
    for direction in case.directions:
        _, error = peers.prepare("ours", case, direction, data)
        assert 0 < error < 0.01


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_wrong_values_are_refused(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data(SMALL, "cpu")

    class Scaled(torch.autograd.Function):
        """Right values, the gradient off."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * factor

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scaled: Tensor = Scaled.apply(k)
        return F.scaled_dot_product_attention(q, scaled, v, is_causal=True)

    bound(monkeypatch, call)
    peers.prepare("ours", SMALL, "forward", data)
    with pytest.raises(peers.RefusedError, match="wrong values: relative error"):
        peers.prepare("ours", SMALL, "backward", data)


def dropped(p: float, seen: list[Tensor] | None = None) -> Callable[..., Tensor]:
    """Attention with dropout; with ``seen`` the value's gradient drops other weights."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = torch.softmax(q.float() @ k.float().mT / 8, -1)
        output = F.dropout(weights, p) @ v.float()
        if seen is not None:
            other = F.dropout(weights, p) @ v.float()
            output = output.detach() + (other - other.detach())
        return output.bfloat16()

    return call


def test_dropout_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data(DROPOUT, "cpu")
    torch.manual_seed(1)
    bound(monkeypatch, dropped(0.1))
    for direction in DROPOUT.directions:
        peers.prepare("ours", DROPOUT, direction, data)
    bound(monkeypatch, dropped(0.0))
    with pytest.raises(peers.RefusedError, match="wrong values"):
        peers.prepare("ours", DROPOUT, "forward", data)
    bound(monkeypatch, dropped(0.1, []))
    with pytest.raises(peers.RefusedError, match="wrong values"):
        peers.prepare("ours", DROPOUT, "backward", data)


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(peers.RefusedError, match=r"not installed: .*flash_attn"):
        peers.bind("fa4", SMALL, "forward")
    old = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "cudnn", old)
    with pytest.raises(peers.RefusedError, match=r"cannot be imported: AttributeError.*sdpa_torch"):
        peers.bind("frontend", SMALL, "forward")
    old.sdpa_torch = lambda *_, **__: None
    with pytest.raises(peers.RefusedError, match="takes no dropout"):
        peers.bind("frontend", DROPOUT, "forward")


def test_the_peers_are_called_as_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, dict[str, object]]] = []

    def operator(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, None]:
        seen.append((q.shape, options))
        return q, None

    module = SimpleNamespace(sdpa_torch=operator, flash_attn_func=operator)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    q = torch.zeros(2, 4, 33, 64)
    assert peers.bind("frontend", SMALL, "backward")(q, q, q, None).shape == q.shape
    assert peers.bind("fa4", SMALL, "backward")(q, q, q, None).shape == q.shape
    assert seen == [
        (torch.Size([2, 4, 33, 64]), {"is_causal": True, "return_lse": True}),
        (torch.Size([2, 33, 4, 64]), {"causal": True}),
    ]


# --------------------------------------------------------------------------------------- report


@pytest.mark.parametrize(
    ("q", "expected"), [(0.0, 1.0), (0.2, 1.6), (0.5, 2.5), (0.8, 3.4), (1.0, 4.0)]
)
def test_quantile(q: float, expected: float) -> None:
    assert report.quantile([4, 2, 3, 1], q) == pytest.approx(expected)
    assert report.quantile([7.0], q) == 7.0


def test_ratio_is_taken_round_by_round() -> None:
    found = Row(DENSE, "forward")
    found.timings["ours"] = Timing([1.0, 10.0, 3.0, 1.0], 1)
    found.timings["cudnn"] = Timing([2.0, 20.0, None, 1.0], 1)
    assert report.ratio(found, "ours", "cudnn") == 0.5
    assert report.ratio(found, "ours", "fa2") is None
    assert report.milliseconds(found, "cudnn") == 2.0


def test_checks() -> None:
    host = Case("host", 1, 8, 8, 64, 64, 64)
    odd = Case("odd", 1, 8, 8, 777, 777, 64)
    rows = [
        row(ours=1.03, cudnn=1.0, fa2=1.5),
        row(direction="backward", ours=1.05, cudnn=1.0),
        row(host, ours=1.15, dropin=1.4, cudnn=1.0),
        row(host, "both", ours=1.15, dropin=1.05, cudnn=1.0),
        row(odd, ours=9.0, cudnn=1.0),
    ]
    found = [(c.direction, c.quantity, c.goal, c.verdict) for c in report.checks(rows)]
    assert found == [
        ("forward", "ours / cudnn", 1.03, "met"),
        ("forward", "fa2 / ours", 1.6, "MISSED"),
        ("backward", "ours / cudnn", 1.03, "MISSED"),
        ("backward", "fa2 / ours", 1.6, "no data"),
        ("forward", "ours / cudnn", 1.2, "met"),
        ("forward", "dropin / cudnn", 1.35, "MISSED"),
        ("both", "ours / cudnn", 1.1, "MISSED"),
        ("both", "dropin / cudnn", 1.1, "met"),
    ]
    text = report.summary(report.checks(rows)).splitlines()
    assert text[-1] == "3 of 8 met"
    assert "fwd 1.030 <= 1.03 met" in text[1]
    assert "bwd 1.050 <= 1.03 MISSED" in text[1]


def test_table_row() -> None:
    found = row(ours=1.0, cudnn=2.0)
    found.timings["cudnn"].late = 0.5
    assert report.table_row(found).split() == [
        *DENSE.name.split(),
        "fwd",
        "1ms",
        "0.0%",
        f"{flops(DENSE, 'forward') / 1e9:.1f}",
        "-",
        f"{flops(DENSE, 'forward') / 2e9:.1f}!",
        *"----",
        "0.500",
    ]
    decode = report.table_row(row(DECODE, cudnn=0.5)).split()
    assert decode[-10:] == ["-", "-", "-", "-", f"{traffic(DECODE) / 0.5e6:.1f}", *"-----"]
    assert report.table_row(Row(DENSE, "backward", failure="no")).endswith("bwd     FAILED: no")


def full_run() -> list[Row]:
    """Rows of every case with the longest reasons that are printed."""
    rows = []
    for case in CASES:
        for direction in case.directions:
            found = row(case, direction, ours=12.345678, cudnn=12.0, fa2=20.0, efficient=50.0)
            found.refused = {"frontend": "r" * 300, "fa4": "not installed: " + "f" * 300}
            rows.append(found)
    return rows


def test_a_full_log_is_short() -> None:
    rows = full_run()
    environment = {name: "x" * 60 for name in "abcdefghi"}
    text = [report.header(environment, CASES), *map(report.table_row, rows), report.notes(rows)]
    text.append(report.summary(report.checks(rows)))
    assert len("\n".join(text)) < 12000
    assert max(len(line) for part in text[1:-2] for line in part.splitlines()) < 140


def test_notes_give_each_reason_once() -> None:
    assert report.notes(full_run()[:6]).splitlines() == [
        f"frontend: {'r' * 200} [dense D64 S1024 causal, dense D64 S1024 and 1 more]",
        f"fa4: not installed: {'f' * 185} [dense D64 S1024 causal, dense D64 S1024 and 1 more]",
    ]


def test_json_has_every_number(tmp_path: Path) -> None:
    found = Row(DENSE, "forward", {"ours": Timing([1.0, None], 3, 0.5, 0.002)}, {"fa4": "absent"})
    report.write_json(tmp_path / "x.json", {"GPU": "none"}, {"seconds": 1.0}, [found])
    whole = json.loads((tmp_path / "x.json").read_text())
    assert whole["environment"] == {"GPU": "none"}
    assert whole["options"] == {"seconds": 1.0}
    (record,) = whole["rows"]
    assert record["name"] == DENSE.name
    assert record["case"]["seq_q"] == 4096
    assert record["flops"] == flops(DENSE, "forward")
    assert record["timings"]["ours"] == {
        "milliseconds": [1.0, None],
        "calls": 3,
        "late": 0.5,
        "error": 0.002,
    }
    assert record["refused"] == {"fa4": "absent"}
    assert [check["verdict"] for check in whole["checks"]] == ["no data", "no data"]


@pytest.mark.parametrize("rows", [full_run(), [row(DECODE, ours=1.0)], []], ids=len)
def test_plot(rows: list[Row], tmp_path: Path) -> None:
    report.plot(tmp_path / "x.png", {"GPU": "none"}, rows)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------- processes and command


def fragile(pipe: Connection) -> None:
    """A measuring process that the odd case kills and the gqa case breaks."""
    pipe.send({"process": str(os.getpid())})
    while (job := pipe.recv()) is not None:
        case = job[0]
        if case.group == "odd":
            os._exit(3)
        answer = Row(case, "forward", refused={"ours": str(os.getpid())})
        pipe.send(([answer], case.group != "gqa"))


def test_a_crash_costs_one_case() -> None:
    cases = [dataclasses.replace(SMALL, group=g) for g in ("dense", "odd", "mask", "gqa")]
    begun: list[dict[str, str]] = []
    rows: list[Row] = []
    assert worker.run(cases, 1.0, 1, begun.append, rows.extend, fragile)
    assert len(begun) == 1
    assert [(r.case.group, r.direction, r.failure) for r in rows] == [
        ("dense", "forward", None),
        ("odd", "forward", "the process died with exit code 3"),
        ("odd", "backward", "the process died with exit code 3"),
        ("mask", "forward", None),
        ("gqa", "forward", None),
    ]
    first, second = rows[0].refused["ours"], rows[3].refused["ours"]
    assert begun[0]["process"] == first != second == rows[4].refused["ours"]


def test_a_process_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(worker.DiedError, match="exit code 1"):
        worker.run([SMALL, SMALL], 1.0, 1, print, print, os._exit)


def test_a_hung_process_is_given_up() -> None:
    measuring = worker.Worker(os._exit)
    with pytest.raises(worker.DiedError, match="no answer within 0 s"):
        measuring.hear(patience=0)
    measuring.stop()


def test_serve_measures_until_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    jobs: list[object] = [(SMALL, 1.0, 2), None]
    pipe: Any = SimpleNamespace(send=sent.append, recv=lambda: jobs.pop(0))
    monkeypatch.setattr(timing, "environment", lambda: {"GPU": "made up"})
    monkeypatch.setattr(timing, "run_case", lambda *job: [job])
    monkeypatch.setattr(timing, "usable", lambda: True)
    worker.serve(pipe)
    assert sent == [{"GPU": "made up"}, ([(SMALL, 1.0, 2)], True)]


def test_command_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "^dense D128.*causal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[:-1]] == ["S1024", "S4096", "S16384"]
    assert lines[0].endswith("quick") and not lines[1].endswith("quick")
    assert "fa4 = FlashAttention-4" in lines[-1]


def test_command_options() -> None:
    options = command.parse(["--quick", "--seconds", "0.1"])
    assert (options.seconds, options.repeats) == (0.1, command.QUICK["repeats"])
    assert options.cases == [case for case in CASES if case.quick]
    assert command.parse([]).cases == command.parse(["--only", "plain"]).cases == CASES
    assert command.parse(["--only", "extended"]).cases == EXTENDED
    assert command.parse(["--only", "all"]).cases == CASES + EXTENDED
    named = command.parse(["--only", "S1:8192"]).cases
    assert [case.group for case in named] == ["decode", "cache"]
    quick = command.parse(["--quick", "--only", "extended"]).cases
    assert [case.name for case in quick] == [
        "padded D128 S2048",
        "packed D128 S2048 causal",
        "cache D128 S1:8192 H32/8",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "("], "no regular expression"),
        (["--only", "nothing"], "no case has such a name"),
        (["--repeats", "0"], "--repeats must be positive"),
    ],
)
def test_command_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_command_without_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", lambda *_: False)
    assert command.main(["--out", str(tmp_path / "out")]) == 1
    assert "need an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_command_writes_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(cases: list[Case], seconds: float, repeats: int, begin: Any, done: Any) -> bool:
        begin({"GPU": "made up"})
        done([row(ours=1.0, cudnn=1.0, fa2=2.0)])
        done([Row(DENSE, "backward", failure="it broke")])
        return True

    monkeypatch.setattr(command, "run", run)
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    text = capsys.readouterr().out
    assert "GPU: made up" in text
    assert "FAILED: it broke" in text
    assert "2 of 4 met" in text
    assert "1 failures" in text
    assert len(json.loads((tmp_path / "out" / "benchmarks.json").read_text())["rows"]) == 2
