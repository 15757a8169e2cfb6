"""The benchmarks of what takes our further arguments, as far as no GPU is needed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as aot
import torch.nn.functional as F
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import extended, peers, report, timing
from benchmarks.cases import (
    EXTENDED,
    FURTHER,
    NO_RIVALS,
    PEERS,
    PLAIN,
    Case,
    Row,
    Timing,
    drawn_lengths,
    flops,
    moved,
    rate,
    traffic,
    visible_pairs,
)
from benchmarks.data import make_data
from cudnn_mha import reference

PADDED = Case("padded", 3, 4, 4, 40, 40, 64, peers=("ours", "cudnn"), layout="padded")
PACKED = dataclasses.replace(PADDED, group="packed", peers=("ours", "varlen"), layout="packed")
WINDOW = Case("window", 2, 2, 2, 50, 50, 64, causal=True, peers=("ours", "flex"), window=9)
CAPPED = Case("capped", 2, 2, 2, 50, 50, 64, peers=("ours", "flex"), softcap=3.0)
CACHE = Case(
    *("cache", 3, 4, 2, 1, 192, 64),
    backward=False,
    peers=("ours", "paged", "fa2", "copy"),
    layout="decode",
)


def some_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that differ for small cases, too."""
    monkeypatch.setattr("benchmarks.cases.LEAST", 5)


# ----------------------------------------------------------------------------------------- cases


def test_the_cases_cover_what_is_promised() -> None:
    assert len({case.name for case in EXTENDED}) == len(EXTENDED)
    assert {case.layout for case in EXTENDED} == {None, "padded", "packed", "decode"}
    for case in EXTENDED:
        assert case.extended and case.columns == FURTHER
        assert set(case.peers) <= set(FURTHER) and case.peers[0] == "ours"
        assert case.rival not in NO_RIVALS
        assert len(case.name) < 30
    assert [case.rival for case in EXTENDED] == [
        *("cudnn", "varlen", "varlen", "flex", "flex", "flex", "fa2"),
    ]
    assert set(FURTHER) | set(PLAIN) == set(PEERS)


def test_lengths_are_drawn_once_and_for_all() -> None:
    found = [drawn_lengths(case) for case in EXTENDED if case.layout in ("padded", "packed")]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 16
    assert 256 <= min(found[0]) < 512 < 1536 < max(found[0]) <= 2048


@pytest.mark.parametrize("causal", [True, False])
def test_visible_pairs_of_drawn_lengths(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    some_lengths(monkeypatch)
    case = dataclasses.replace(PACKED, causal=causal)
    counts = drawn_lengths(case)
    assert len(set(counts)) == 3
    pairs = [(i, j) for n in counts for i in range(n) for j in range(n) if j <= i or not causal]
    assert visible_pairs(case) == len(pairs)
    assert flops(case, "forward") == 4 * 4 * 64 * len(pairs)
    assert traffic(case) == 4 * 2 * sum(counts) * 4 * 64


def test_visible_pairs_of_a_window() -> None:
    counted = sum(0 <= i - j <= 9 for i in range(50) for j in range(50))
    assert visible_pairs(WINDOW) == 2 * counted
    wide = dataclasses.replace(WINDOW, window=500)
    assert visible_pairs(wide) == visible_pairs(dataclasses.replace(WINDOW, window=None))


def test_a_copy_moves_the_keys_twice() -> None:
    keys = 3 * 2 * 192 * 64 * 2
    assert moved(CACHE, "copy") == 2 * keys
    assert moved(CACHE, "ours") == traffic(CACHE) == 2 * keys + 2 * 3 * 4 * 64 * 2
    assert rate(CACHE, "forward", 1.0, "copy") == pytest.approx(2 * keys / 1e6)


# ------------------------------------------------------------------------------------------ data


@pytest.mark.parametrize("case", [PADDED, PACKED, WINDOW, CAPPED, CACHE], ids=lambda c: c.group)
def test_data_agrees_with_a_mask(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition with everything said by one mask, all sequences at once."""
    some_lengths(monkeypatch)
    data = make_data(case, "cpu")
    counts = drawn_lengths(case) if case.backward and case.layout else [case.seq_kv] * case.batch
    tensors = [t.detach().double() for t in (*data.leaves, data.grad_output)]
    if case.layout == "packed":
        assert data.bounds is not None
        assert data.bounds.tolist() == [sum(counts[:n]) for n in range(4)]
        assert data.leaves[0].shape == (sum(counts), 4, 64)
        owner = torch.arange(3).repeat_interleave(torch.tensor(counts))
        mask = owner[:, None] == owner
        tensors = [t.transpose(0, 1)[None] for t in tensors]
    else:
        i = torch.arange(case.seq_q)[:, None]
        j = torch.arange(case.seq_kv)
        mask = j < torch.tensor(counts)[:, None, None, None]
        if case.window is not None:
            mask = mask & (i >= j) & (i - j <= case.window)
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    output, _ = reference.attention(*leaves, mask, softcap=case.softcap)
    expected = [output]
    if case.backward:
        expected += torch.autograd.grad(output, leaves, tensors[3])
    if data.real is not None:
        expected[0] = expected[0] * data.real
    assert len(data.expected) == len(expected)
    for got, wanted in zip(data.expected, expected, strict=True):
        if case.layout == "packed":
            wanted = wanted[0].transpose(0, 1)
        assert got.shape == wanted.shape
        assert peers.relative_error(got, wanted) < 1e-6
    if case.layout is not None:
        assert data.lengths is not None and data.lengths.tolist() == counts
        assert data.longest == max(counts)


def test_padding_is_token_major_and_has_no_part_in_the_loss() -> None:
    data = make_data(PADDED, "cpu")
    assert data.leaves[0].shape == (3, 4, 40, 64)
    assert data.leaves[0].transpose(1, 2).is_contiguous()
    assert data.mask is not None and data.mask.shape == (3, 1, 1, 40)
    assert data.mask.sum().item() == sum(drawn_lengths(PADDED))
    assert data.real is not None
    assert not data.grad_output.masked_select(~data.real).any()


def test_pages_hold_the_keys() -> None:
    data = make_data(CACHE, "cpu")
    assert data.pages is not None
    assert data.pages.key.shape == (9, 2, 64, 64)
    assert data.pages.table.dtype == torch.int32
    table = data.pages.table.long()
    assert table.flatten().tolist() != list(range(9))
    for whole, pages in ((data.leaves[1], data.pages.key), (data.leaves[2], data.pages.value)):
        for b in range(3):
            assert torch.equal(torch.cat([*pages[table[b]]], dim=1), whole[b])


# ----------------------------------------------------------------------------------------- peers


def without_fallback(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lets our functions compute without a GPU, by their own fallback; what they were told."""
    told: list[dict[str, Any]] = []

    def allowed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, fallback: bool, **options: Any) -> Any:
            assert not fallback
            told.append(options)
            return function(*arguments, **options)

        return call

    for name in ("cudnn_sdpa", "cudnn_sdpa_varlen", "cudnn_sdpa_paged"):
        monkeypatch.setattr(extended, name, allowed(getattr(extended, name)))
    return told


@pytest.mark.parametrize("case", [PADDED, PACKED, WINDOW, CAPPED, CACHE], ids=lambda c: c.group)
def test_ours_gets_right_values(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    some_lengths(monkeypatch)
    told = without_fallback(monkeypatch)
    data = make_data(case, "cpu")
    for direction in case.directions:
        step, error = peers.prepare("ours", case, direction, data)
        assert 0 < error < 0.01
        step()
    if case.layout == "padded":
        assert told[0]["seq_lens_q"] is told[0]["seq_lens_kv"] is data.lengths
    if case.layout == "decode":
        assert told[0]["seq_lens_q"] is None and told[0]["seq_lens_kv"] is data.lengths
        assert 0 < peers.prepare("paged", case, "forward", data)[1] < 0.01
        assert peers.prepare("copy", case, "forward", data)[1] == 0


def test_padding_of_a_peer_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    some_lengths(monkeypatch)
    data = make_data(PADDED, "cpu")

    def masked(*_: object) -> extended.Call:
        def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            output = F.scaled_dot_product_attention(q, k, v, mask)
            return output.where(data.real, float("nan")) if spoilt else output * factor

        return call

    monkeypatch.setattr(extended, "bind", masked)
    spoilt, factor = False, 1.0
    assert peers.prepare("ours", PADDED, "backward", data)[1] < 0.01
    spoilt = True
    assert peers.prepare("ours", PADDED, "forward", data)[1] < 0.01
    spoilt, factor = False, 1.1
    with pytest.raises(peers.RefusedError, match="wrong values"):
        peers.prepare("ours", PADDED, "forward", data)


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, 0)), (False, (-1, -1))])
def test_varlen_is_called_as_it_wants(
    causal: bool, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    some_lengths(monkeypatch)
    case = dataclasses.replace(PACKED, causal=causal)
    data = make_data(case, "cpu")
    seen: list[tuple[object, ...]] = []

    def operator(q: Tensor, *arguments: object, window_size: tuple[int, int]) -> Tensor:
        seen.append((*arguments[2:], window_size))
        return q

    module = SimpleNamespace(varlen_attn=operator)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    extended.bind("varlen", case, data)(*data.leaves, None)
    longest = max(drawn_lengths(case))
    assert seen == [(data.bounds, data.bounds, longest, longest, window)]


@pytest.mark.parametrize("case", [WINDOW, CAPPED, dataclasses.replace(CAPPED, causal=True)])
def test_flex_gets_right_values(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled and forward: more than this it cannot do without a GPU."""
    compiled = torch.compile

    def compile(function: Any, **options: Any) -> Any:
        return function if options == {"dynamic": False} else compiled(function, **options)

    monkeypatch.setattr(torch, "compile", compile)
    case = dataclasses.replace(case, backward=False)
    data = make_data(case, "cpu")
    with aot.patch(donated_buffer=True):
        assert 0 < peers.prepare("flex", case, "forward", data)[1] < 0.01
        assert not aot.donated_buffer


def test_a_missing_peer_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(steps: Mapping[str, Callable[[], object]], direction: str) -> timing.Clock:
        assert [*steps] == ["ours"]
        return lambda turn: {name: (float(calls), False) for name, calls in turn}

    without_fallback(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.setattr(timing, "device_clock", clock)
    monkeypatch.setattr(timing, "make_data", lambda case: make_data(case, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for row in timing.run_case(PACKED, 0.01, 3):
        assert row.failure is None
        assert row.timings["ours"].milliseconds == [1.0] * 3
        assert "torch.nn.attention.varlen" in row.refused["varlen"]
        assert set(row.refused) == {"varlen"}


# ---------------------------------------------------------------------------------------- report


def found_rows() -> list[Row]:
    """Rows of every case, each peer as fast as it stands far ahead."""
    return [
        Row(case, direction, {p: Timing([n + 1.0] * 3, 1) for n, p in enumerate(case.peers)})
        for case in EXTENDED
        for direction in case.directions
    ]


def test_comparison() -> None:
    lines = report.comparison(found_rows()).splitlines()
    assert len(lines) == 1 + 6 * 2 + 1
    assert lines[1].split("fwd")[1].strip() == "cudnn 2.00, efficient 3.00"
    case = EXTENDED[-1]
    part = 4 * moved(case, "ours") / moved(case, "copy")
    assert lines[-1].split("fwd")[1].strip() == (
        f"fa2 3.00, ours {part:.0%} of a copy, paged {part / 2:.0%} of a copy, "
        f"fa2 {part / 3:.0%} of a copy"
    )
    assert report.comparison([Row(WINDOW, "forward", failure="no")]) == ""


def test_table_and_header() -> None:
    rows = found_rows()
    titles = report.titles(FURTHER).splitlines()[-1].split()
    assert titles == ["case", "ours", "+-", *FURTHER, "o/p"]
    assert report.titles(PLAIN).endswith("o/c")
    cells = report.table_row(rows[-1]).split()
    case = rows[-1].case
    by_peer = dict(zip(FURTHER, cells[-9:-1], strict=True))
    assert by_peer["cudnn"] == by_peer["flex"] == "-"
    assert by_peer["copy"] == f"{moved(case, 'copy') / 4e6:.1f}"
    assert cells[-1] == "0.333"
    assert max(len(report.table_row(row)) for row in rows) < 140
    text = report.header({"GPU": "none"}, EXTENDED)
    mean = sum(drawn_lengths(EXTENDED[0])) / 16
    assert f"mean {mean:.0f}" in text
    assert "varlen: PyTorch's varlen_attn" in text and "fa4" not in text


def test_files(tmp_path: Path) -> None:
    rows = found_rows()
    report.write_json(tmp_path / "x.json", {}, {}, rows)
    records = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert records[0]["ratios"] == {"cudnn": 2.0, "efficient": 3.0}
    assert records[0]["shares"] == {}
    assert set(records[-1]["shares"]) == {"ours", "paged", "fa2"}
    report.plot(tmp_path / "x.png", {}, rows)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_command_prints_a_table_for_each_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Case("dense", 2, 4, 4, 64, 64, 64)

    def run(cases: list[Case], seconds: float, repeats: int, begin: Any, done: Any) -> bool:
        begin({"GPU": "made up"})
        done([Row(plain, "forward", {"ours": Timing([1.0], 1)})])
        for row in found_rows():
            done([row])
        return True

    monkeypatch.setattr(command, "run", run)
    assert command.main(["--only", "all", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("o/c\n") == text.count("o/p\n") == 1
    assert "varlen 2.00" in text
