"""One plan for many lengths: which calls share one, and what it is told of each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import config, devices, dispatch, lengths, reference
from cudnn_mha.cache import Slot
from cudnn_mha.checks import Reason
from cudnn_mha.graph_builder import Uid, operands
from cudnn_mha.inputs import Options, backward_spec, layout_of
from cudnn_mha.lengths import FEW, Met, Way, shared, tell, wanted, way
from cudnn_mha.spec import AttentionSpec, TensorSpec
from tests import interpreter
from tests.support import BACKWARD, BHSD, BSHD, FORWARD, attention, refusal, tensor

H200 = devices.described("h200")
CPU = torch.device("cpu")

# Memory orders, from the outermost dimension in.
TOKENS = (BSHD, (2, 0, 1, 3), (2, 1, 0, 3))
HEADS = (BHSD, (1, 0, 2, 3), (1, 2, 0, 3))


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets what lengths plans are made for."""

    def put(value: str) -> None:
        monkeypatch.setenv(config.LENGTHS, value)
        config.reload()

    monkeypatch.setattr(lengths, "met", Met())
    monkeypatch.delenv(config.LENGTHS, raising=False)
    config.reload()
    yield put
    monkeypatch.undo()
    config.reload()


# ------------------------------------------------------------------------------------------- way


@pytest.mark.parametrize("order", [*TOKENS, *HEADS])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["forward", "lse", "backward"])
def test_ways(order: tuple[int, ...], grouped: bool, kind: str) -> None:
    heads = (4, 2, 2) if grouped else (4, 4, 4)
    forward = attention(heads=heads, order=order, lse=kind != "forward")
    specs = [forward]
    if kind == "backward":
        specs.append(attention(BACKWARD, heads=heads, order=order))
    found = way(specs, H200)
    if order in TOKENS:
        assert found is Way.BY_TOKEN
    else:
        assert found is (None if grouped and kind != "forward" else Way.BY_HEAD)


def test_every_tensor_must_lie_by_token() -> None:
    spec = attention(order=BSHD)
    assert way([dataclasses.replace(spec, value=tensor((2, 4, 128, 64)))], H200) is Way.BY_HEAD
    backward = attention(BACKWARD, order=BSHD)
    odd = dataclasses.replace(backward, grad_output=tensor((2, 4, 128, 64)))
    assert way([spec, backward], H200) is Way.BY_TOKEN
    assert way([spec, odd], H200) is Way.BY_HEAD


@pytest.mark.parametrize("order", [BHSD, BSHD])
def test_single_heads_and_single_tokens_lie_by_token(order: tuple[int, ...]) -> None:
    assert way([attention(heads=(1, 1, 1), order=order)], H200) is Way.BY_TOKEN
    assert way([attention(lengths=(1, 1), order=order)], H200) is Way.BY_TOKEN


def test_heads_that_are_repeated_do_not_lie_within_a_token() -> None:
    repeated = TensorSpec((2, 4, 128, 64), (8192, 0, 64, 1), "float16")
    assert way([attention(order=BSHD, key=repeated, value=repeated)], H200) is Way.BY_HEAD


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": tensor((2, 4, 128, 128))},
        {"dropout_p": 0.5},
        {"softcap": 3.0},
        {"slopes": True},
    ],
)
def test_what_shares_no_plan(fields: dict[str, Any]) -> None:
    assert way([attention(order=BSHD, **fields)], H200) is None


@pytest.mark.parametrize("profile", ["a100-sxm-80gb", "b200", "l40s"])
def test_other_gpus_share_no_plan(profile: str) -> None:
    assert way([attention(order=BSHD)], devices.described(profile)) is None


# ---------------------------------------------------------------------------------------- shared

SPREAD = (129, 130, 200, 255, 256)


@pytest.mark.parametrize("order", [*TOKENS, *HEADS])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_one_spec_for_all_lengths_of_a_bucket(
    direction: Any, heads: int, order: tuple[int, ...]
) -> None:
    found = set()
    for pair in itertools.product(SPREAD, SPREAD):
        spec = attention(direction, heads=(heads,) * 3, lengths=pair, order=order, causal=True)
        chosen = way([spec], H200)
        assert chosen is not None
        found.add(shared(spec, chosen))
    (spec,) = found
    assert (spec.seq_q, spec.seq_kv, spec.ragged) == (256, 256, True)
    assert refusal(spec, H200) is None


@pytest.mark.parametrize("order", [BSHD, BHSD])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_single_token_shares_the_plan_of_its_bucket(heads: int, order: tuple[int, ...]) -> None:
    found = set()
    chosen = Way.BY_TOKEN if order == BSHD or heads == 1 else Way.BY_HEAD
    for length in (1, 2, 100, 128):
        spec = attention(heads=(heads,) * 3, lengths=(length, length), order=order, lse=True)
        found.add(shared(spec, chosen))
    assert len(found) == 1


def test_decoding_has_a_plan_for_one_query() -> None:
    """Unless the log-sum-exp is wanted, which such ragged graphs get wrong."""
    decoding = [attention(lengths=(1, n), order=BSHD) for n in SPREAD]
    (spec,) = {shared(s, Way.BY_TOKEN) for s in decoding}
    assert (spec.seq_q, spec.seq_kv) == (1, 256)
    assert shared(attention(lengths=(1, 200), order=BSHD, lse=True), Way.BY_TOKEN).seq_q == 128
    backward = attention(BACKWARD, lengths=(1, 200), order=BSHD)
    assert shared(backward, Way.BY_TOKEN).seq_q == 128


@pytest.mark.parametrize("chosen", list(Way))
def test_other_calls_have_other_plans(chosen: Way) -> None:
    order = BSHD if chosen is Way.BY_TOKEN else BHSD
    kinds: list[dict[str, Any]] = [
        {},
        {"lengths": (300, 200)},
        {"lengths": (200, 300)},
        {"dtype": "bfloat16"},
        {"dims": (64, 32)},
        {"dims": (32, 64)},
        {"batch": 3},
        {"heads": (2, 2, 2)},
        {"causal": True},
        {"lse": True},
        {"scale": 0.5},
    ]
    specs = [attention(**({"lengths": (200, 200), "order": order} | k)) for k in kinds]
    found = {shared(spec, chosen) for spec in specs}
    assert len(found) == len(kinds)


def test_by_head_every_head_is_a_sequence() -> None:
    spec = shared(attention(batch=3, heads=(4, 2, 1), lengths=(200, 100)), Way.BY_HEAD)
    assert spec.query.shape == (12, 1, 256, 64)
    assert spec.key.shape == spec.value.shape == (12, 1, 128, 64)


def test_the_remedy_of_dense_plans_is_dropped() -> None:
    spec = attention(BACKWARD, order=BSHD, padding=True)
    assert not shared(spec, Way.BY_TOKEN).padding


# ------------------------------------------------------------------------------------------ tell


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], gap: int = 0) -> Tensor:
    """Random numbers in that memory order, perhaps with NaN between the tokens."""
    *rows, dim = shape
    dense = torch.full([shape[d] for d in order[:3]] + [dim + gap], torch.nan, dtype=torch.float16)
    back = [order.index(d) for d in range(3)]
    tensor = dense[..., :dim].permute(*back, 3)
    return tensor.copy_(torch.randn(*rows, dim))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("pair", [(5, 7), (1, 7), (7, 1), (130, 20)], ids=str)
@pytest.mark.parametrize("order", [*TOKENS, *HEADS])
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_what_plans_are_told_makes_them_compute_the_call(
    monkeypatch: pytest.MonkeyPatch,
    gradient: bool,
    heads: tuple[int, int, int],
    order: tuple[int, ...],
    pair: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    interpreter.without_streams(monkeypatch)
    shapes = [(3, h, s, d) for h, s, d in zip(heads, (*pair, pair[1]), (16, 16, 8), strict=True)]
    query, key, value = (laid_out(shape, order, gap=8) for shape in shapes)
    upstream, output = (laid_out((*shapes[0][:3], 8), order) for _ in range(2))
    layouts = [layout_of(t) for t in (query, key, value, output)]
    forward = AttentionSpec(FORWARD, *layouts, scale=0.25, causal=True, lse=gradient)
    specs = [forward]
    if gradient:
        specs.append(
            backward_spec(forward, layout_of(upstream), bias_gradient=False, deterministic=False)
        )
    chosen = way(specs, H200)
    if chosen is None:
        assert gradient and heads == (4, 2, 1) and order in HEADS
        return
    told = tell(specs, chosen, CPU)
    lse = torch.full((3, heads[0], pair[0], 1), torch.nan)
    if told.by_token:
        lse = torch.full((3, pair[0], heads[0], 1), torch.nan).transpose(1, 2)
    tensors = [query, key, value, output, *([lse] if gradient else [])]
    run(shared(specs[0], chosen), [t.data_ptr() for t in tensors] + told.forward)
    leaves = [t.float().requires_grad_() for t in (query, key, value)]
    want, sums = reference.attention(*leaves, is_causal=True, scale=0.25)
    close(output, want)
    if not gradient:
        assert told.gradients == [] and told.backward_spec is None
        return
    close(lse.squeeze(-1), sums)
    assert told.backward_spec == specs[1]
    given = [query, key, value, output, lse]
    grads = []
    for name in ("grad_query", "grad_key", "grad_value"):
        layout = getattr(specs[1], name)
        grads.append(torch.empty_strided(layout.shape, layout.stride, dtype=torch.float16))
        grads[-1].fill_(torch.nan)
    addresses = [t.data_ptr() for t in given] + told.backward
    addresses += [t.data_ptr() for t in (upstream, *grads)] + told.gradients
    run(shared(specs[1], chosen), addresses)
    for got, right in zip(grads, torch.autograd.grad(want, leaves, upstream.float()), strict=True):
        close(got, right)


def run(spec: AttentionSpec, addresses: list[int]) -> None:
    interpreter.interpret(spec, dict(zip(operands(spec), addresses, strict=True)))


def test_lengths_are_told_for_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.without_streams(monkeypatch)
    spec = attention(batch=3, heads=(4, 2, 2), lengths=(5, 9))
    for chosen, count in ((Way.BY_TOKEN, 3), (Way.BY_HEAD, 12)):
        told = tell([spec], chosen, CPU).operands
        assert told[Uid.SEQ_LEN_Q].tolist() == [5] * count
        assert told[Uid.SEQ_LEN_KV].tolist() == [9] * count
        assert told[Uid.SEQ_LEN_KV].dtype == torch.int32
        assert all(t.shape == (count + 1,) for uid, t in told.items() if "OFFSET" in uid.name)
    keys = told[Uid.OFFSET_KEY]
    assert keys.tolist() == [576 * n for n in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5)]
    assert keys.dtype == torch.int64


# --------------------------------------------------------------------------------- met and wanted


def test_a_few_lengths_are_met() -> None:
    met = Met()
    specs = [attention(order=BSHD, lengths=(n, n)) for n in range(200, 200 + FEW + 2)]
    assert [met.few(spec, Way.BY_TOKEN) for spec in specs] == [True] * FEW + [False] * 2
    assert met.few(specs[0], Way.BY_TOKEN)
    assert not met.few(specs[FEW], Way.BY_TOKEN)
    # Whatever the bucket: this counts lengths of otherwise equal calls.
    assert not met.few(attention(order=BSHD, lengths=(5000, 5000)), Way.BY_TOKEN)
    assert met.few(attention(order=BSHD, lengths=(250, 250), causal=True), Way.BY_TOKEN)
    assert met.few(attention(order=BHSD, lengths=(250, 250)), Way.BY_HEAD)
    met.clear()
    assert met.few(specs[FEW], Way.BY_TOKEN)


@pytest.mark.parametrize("order", [*TOKENS, *HEADS])
def test_lengths_are_counted_together_in_every_layout(order: tuple[int, ...]) -> None:
    met = Met()
    sizes = (130, 131, 1000, 2, 700)
    specs = [attention(order=order, lengths=(n, n)) for n in sizes]
    chosen = Way.BY_TOKEN if order in TOKENS else Way.BY_HEAD
    assert [met.few(spec, chosen) for spec in specs] == [True] * FEW + [False] * (5 - FEW)


def test_modes(mode: Callable[[str], None]) -> None:
    specs = [[attention(order=BSHD, lengths=(n, n))] for n in range(200, 200 + FEW + 1)]

    def unknown() -> bool:
        return False

    mode("exact")
    assert [wanted(s, H200, unknown) for s in specs] == [None] * (FEW + 1)
    mode("bucketed")
    assert [wanted(s, H200, unknown) for s in specs] == [Way.BY_TOKEN] * (FEW + 1)
    mode("auto")
    assert [wanted(s, H200, unknown) for s in specs] == [None] * FEW + [Way.BY_TOKEN]
    # A plan of its own that is there already is better than a shared one.
    assert wanted(specs[-1], H200, lambda: True) is None
    assert wanted(specs[-1], devices.described("b200"), unknown) is None


def test_calls_that_share_nothing_are_not_counted(mode: Callable[[str], None]) -> None:
    mode("auto")
    for n in range(200, 200 + 2 * FEW):
        spec = attention(order=BSHD, lengths=(n, n), dropout_p=0.5)
        assert wanted([spec], H200, lambda: False) is None
    assert not lengths.met._lengths


def test_a_refused_shared_plan_leaves_the_call_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.LENGTHS, "bucketed")
    config.reload()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked: list[AttentionSpec] = []

    def find_plan(spec: AttentionSpec, *_: object) -> tuple[Any, tuple[Reason, ...]]:
        asked.append(spec)
        if spec.ragged:
            return None, (Reason("workspace_limit", "it needs more"),)
        return Slot(SimpleNamespace(spec=spec)), ()

    monkeypatch.setattr(dispatch, "find_plan", find_plan)
    here = dataclasses.replace(devices.described("h200"), index=0)
    query = torch.empty(2, 200, 4, 64, dtype=torch.float16, device="meta").transpose(1, 2)
    found = dispatch.decide(
        query, query, query, None, Options(), gradient=True, device=here, chosen=True
    )
    assert [spec.ragged for spec in asked] == [True, True, False, False]
    assert found.served and found.told is None and found.reasons == ()
    monkeypatch.undo()
    config.reload()
