"""The kernels below autograd without a GPU: calls in parts, remedies undone, decisions kept.

cuDNN is played by the definition, which takes the tensors as cuDNN would get them: prepared, and
of no more heads than `LIMIT` in the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import attention, dispatch, kernels, ops, reference
from cudnn_mha.cache import Slot
from cudnn_mha.checks import Reason
from cudnn_mha.dispatch import Decision
from cudnn_mha.inputs import Options, outline, prepare
from cudnn_mha.kernels import Arguments, Gradients, NotServed

S, D = 6, 8


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    kernels._decisions.clear()


class Played:
    """What stands for cuDNN, and what it was asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.forward_seeds: list[int] = []
        self.backward_seeds: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.extra: tuple[Reason, ...] = ()

    def decide(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Options,
        *,
        gradient: bool,
        bias_gradient: bool,
        chosen: bool,
        output: Tensor,
    ) -> Decision:
        decision = Decision(options, outline(query, value, options), gradient=gradient)
        decision.bias_gradient = bias_gradient
        if query.shape[0] * query.shape[1] > self.limit:
            decision.reasons = (Reason("launch_grid", "too many heads"), *self.extra)
            return decision
        inputs = prepare(query, key, value, mask, options)
        decision.as_is = all(
            a is b for a, b in zip(inputs, (query, key, value, None), strict=False)
        )
        written = torch.empty(*inputs.query.shape[:3], inputs.value.shape[3])
        decision.output_stride = (output if decision.as_is else written).stride()
        decision.forward = Slot(None)
        return decision

    def forward(
        self,
        decision: Decision,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        p = decision.options.dropout_p
        assert (seed is None) == (offset is None) == (p == 0)
        self.shapes.append(tuple(query.shape))
        if seed is not None:
            self.forward_seeds.append(int(seed))
        output, lse = reference.attention(
            query,
            key,
            value,
            bias,
            p,
            decision.options.is_causal,
            decision.outline.scale,
            dropout_mask=kernels.kept_weights(query, key, p, seed),
        )
        written = output.new_empty_strided(output.shape, decision.output_stride)
        return written.copy_(output), lse.unsqueeze(-1)

    def backward(
        self,
        decision: Decision,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        output: Tensor,
        lse: Tensor,
        seed: Tensor | None,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        p = decision.options.dropout_p
        assert output.stride() == decision.output_stride and lse.is_contiguous()
        if seed is not None:
            self.backward_seeds.append(int(seed))
        *grads, scores = reference.gradients(
            grad_output,
            query,
            key,
            value,
            output,
            lse.squeeze(-1),
            bias,
            p,
            decision.options.is_causal,
            decision.outline.scale,
            dropout_mask=kernels.kept_weights(query, key, p, seed),
        )
        wanted = bias is not None and decision.bias_gradient
        grad_bias = scores.sum_to_size(bias.shape) if wanted and bias is not None else None
        return grads[0], grads[1], grads[2], grad_bias


Play = Callable[[int], Played]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def begin(limit: int) -> Played:
        played = Played(limit)
        monkeypatch.setattr(kernels, "decide", played.decide)
        monkeypatch.setattr(attention, "forward", played.forward)
        monkeypatch.setattr(attention, "backward", played.backward)
        return played

    return begin


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(
    batch: int = 4, heads: tuple[int, int, int] = (4, 4, 4), dims: tuple[int, int] = (D, D)
) -> list[Tensor]:
    widths = (dims[0], dims[0], dims[1])
    return [randn(batch, h, S, d) for h, d in zip(heads, widths, strict=True)]


def close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    """Equal but for a float32 log-sum-exp or mask."""
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def same_as_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> None:
    """Output, log-sum-exp and gradients of the operators, which raise where they do not use us."""
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    bias = exact = mask
    wanted = [*leaves]
    gradient = mask is not None and mask.dtype != torch.bool
    if mask is not None and gradient:
        bias = mask.detach().requires_grad_()
        exact = bias.double()
        wanted.append(bias)
    output, lse, *_ = ops.sdpa_forward(
        *leaves, bias, 0.0, causal, scale=scale, bias_gradient=gradient, fallback=False
    )
    want, want_lse = reference.attention(*leaves, exact, is_causal=causal, scale=scale)
    close(output, want)
    close(lse, want_lse.unsqueeze(-1))
    upstream = torch.randn_like(output)
    got = torch.autograd.grad(output, wanted, upstream)
    for tensor, grad, right in zip(
        wanted, got, torch.autograd.grad(want, wanted, upstream), strict=True
    ):
        assert grad.shape == tensor.shape
        # Where entries are one in memory, which of them has the gradient means nothing.
        own = [1 if s == 0 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        own = own if tensor is bias else list(tensor.shape)
        close(grad.sum_to_size(own), right.sum_to_size(own))
    assert output.stride() == torch.empty_like(want).stride() or value.shape[-1] != D
    for tensor, grad in zip(leaves, got, strict=False):
        assert grad.stride() == torch.empty_like(tensor).stride()
    plain = ops.sdpa_inference(*leaves[:3], bias, 0.0, causal, scale=scale, fallback=False)
    close(plain.detach(), want.detach())


# ------------------------------------------------------------------------------------------- parts

MASKS: dict[str, Callable[[int, int], Tensor | None]] = {
    "none": lambda b, h: None,
    "bool": lambda b, h: torch.rand(b, h, S, S) > 0.3,
    "bool_row": lambda b, h: torch.rand(S) > 0.3,
    "float": lambda b, h: torch.randn(b, h, S, S),
    "of_batch": lambda b, h: torch.randn(b, 1, 1, S),
    "of_heads": lambda b, h: torch.randn(h, S, 1),
    "of_rows": lambda b, h: torch.randn(S, S),
    "one_batch": lambda b, h: torch.randn(1, h, S, S),
    "expanded": lambda b, h: torch.randn(1, 1, S, S).expand(b, h, S, S),
    "expanded_batch": lambda b, h: torch.randn(1, h, 1, S).expand(b, h, 1, S),
}
every_mask = pytest.mark.parametrize("mask", MASKS)


@every_mask
@pytest.mark.parametrize("limit", [64, 8, 4])
def test_batch_in_parts(play: Play, limit: int, mask: str) -> None:
    """16 heads in all: in one piece, in two and in four."""
    played = play(limit)
    same_as_definition(*qkv(), MASKS[mask](4, 4))
    assert set(played.shapes) == {(min(limit, 16) // 4, 4, S, D)}
    assert len(played.shapes) == 2 * max(16 // limit, 1)  # with and without a gradient


@every_mask
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2), (4, 1, 1), (4, 2, 1), (4, 1, 4)], ids=str)
def test_heads_in_parts(play: Play, heads: tuple[int, int, int], mask: str) -> None:
    """Groups stay together; a head that all share goes into both halves, its gradients add up."""
    played = play(2)
    same_as_definition(*qkv(1, heads), MASKS[mask](1, 4))
    assert played.shapes == [(1, 2, S, D)] * 4


def test_heads_are_cut_between_groups(play: Play) -> None:
    played = play(4)
    same_as_definition(*qkv(1, (6, 3, 3)), MASKS["float"](1, 6))
    assert played.shapes == [(1, 2, S, D), (1, 4, S, D)] * 2


@every_mask
def test_batch_and_then_heads_in_parts(play: Play, mask: str) -> None:
    played = play(1)
    same_as_definition(*qkv(3, (4, 1, 1), (D, 12)), MASKS[mask](3, 4))
    assert played.shapes == [(1, 1, S, D)] * 24


@pytest.mark.parametrize("batch,limit", [(5, 4), (3, 8), (7, 3)])
def test_odd_parts(play: Play, batch: int, limit: int) -> None:
    play(limit)
    same_as_definition(*qkv(batch, (3, 3, 1)), MASKS["of_batch"](batch, 3))


def test_parts_of_causal_transposed_tensors(play: Play) -> None:
    play(4)
    tensors = [randn(4, S, 4, D).transpose(1, 2) for _ in range(3)]
    same_as_definition(*tensors, causal=True, scale=0.4)


def test_parts_of_an_expanded_batch(play: Play) -> None:
    play(4)
    same_as_definition(*(t[:1].expand(4, -1, -1, -1) for t in qkv()))


def test_every_part_drops_by_a_seed_of_its_own(play: Play) -> None:
    played = play(1)
    query, key = torch.zeros(2, 4, 4, S, D, dtype=torch.float64).unbind()
    value = torch.eye(S, dtype=torch.float64).expand(4, 4, S, S)
    arguments = Arguments(dropout_p=0.5)
    seed, offset = torch.tensor(1000), torch.tensor(7)
    drawn = {"seed": seed, "offset": offset}
    output, lse = kernels.forward(query, key, value, None, arguments, True, **drawn)
    assert lse is not None
    found = kernels.backward(value, query, key, value, output, lse, None, arguments, False, **drawn)
    assert len(set(played.forward_seeds)) == len(played.forward_seeds) == 16
    assert played.forward_seeds[0] == 1000
    assert played.backward_seeds == played.forward_seeds
    kept = output != 0
    assert torch.equal(kept, found.value.mT != 0)
    assert 0 < kept.double().mean() < 1
    patterns = {tuple(part.flatten().tolist()) for part in kept.flatten(0, 1)}
    assert len(patterns) == 16
    again, _ = kernels.forward(query, key, value, None, arguments, True, **drawn)
    assert torch.equal(again, output)


def test_a_call_that_cannot_be_cut_is_not_served(play: Play) -> None:
    play(0)
    with pytest.raises(NotServed, match="too many heads") as error:
        kernels.forward(*qkv(), None, Arguments(), True)
    assert [reason.rule for reason in error.value.reasons] == ["launch_grid"]


def test_a_call_with_another_reason_is_not_cut(play: Play) -> None:
    played = play(4)
    played.extra = (Reason("dtype", "no such dtype"),)
    query, key, value = qkv()
    for run in (
        lambda: kernels.forward(query, key, value, None, Arguments(), True),
        lambda: kernels.backward(
            query, query, key, value, query, randn(4, 4, S, 1), None, Arguments()
        ),
    ):
        with pytest.raises(NotServed) as error:
            run()
        assert [reason.rule for reason in error.value.reasons] == ["launch_grid", "dtype"]
    assert played.shapes == []


# ---------------------------------------------------------------------------- remedies and undoing


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.7])
@pytest.mark.parametrize("limit", [64, 4])
def test_scales_that_cudnn_is_not_given(play: Play, scale: float | None, limit: int) -> None:
    """Of a scale below zero the query bears the sign, and so does its gradient."""
    play(limit)
    same_as_definition(*qkv(heads=(4, 2, 1)), scale=scale)
    same_as_definition(*qkv(heads=(4, 2, 1)), causal=True, scale=scale)


@pytest.mark.parametrize("dims", [(20, 20), (8, 12), (13, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("limit", [64, 4])
def test_padded_head_dimensions(play: Play, dims: tuple[int, int], limit: int) -> None:
    played = play(limit)
    same_as_definition(*qkv(dims=dims), MASKS["of_rows"](4, 4))
    assert {shape[-1] for shape in played.shapes} == {math.ceil(dims[0] / 8) * 8}


@pytest.mark.parametrize("low", [-2e4, -1e9])
@pytest.mark.parametrize("limit", [64, 4])
def test_rows_of_low_mask_values(play: Play, low: float, limit: int) -> None:
    """The kernels' log-sum-exp is less the row's largest entry, as that of plain PyTorch is."""
    play(limit)
    mask = torch.randn(4, 1, S, S)
    mask[:, :, 1] += low
    mask[:, :, 2] = -math.inf
    query, key, value = qkv()
    output, lse = kernels.forward(query, key, value, mask, Arguments(), True)
    want, want_lse = kernels.reference_forward(query, key, value, mask, Arguments())
    assert lse is not None
    close(output, want)
    close(lse, want_lse)
    assert lse[:, :, 1].abs().max() < 20 and (lse[:, :, 2] == -math.inf).all()
    upstream = torch.randn_like(output)
    found = kernels.backward(upstream, query, key, value, output, lse, mask, Arguments(), True)
    right = kernels.reference_backward(
        upstream, query, key, value, want, want_lse, mask, Arguments(), bias_gradient=True
    )
    for grad, exact in zip(found[:4], right[:4], strict=True):
        assert grad is not None and exact is not None
        close(grad, exact)


def test_an_output_that_was_copied_elsewhere_is_taken_as_the_plan_wants_it(play: Play) -> None:
    """A compiler may hand the stash back in another layout."""
    play(64)
    query, key, value = qkv()
    output, lse = kernels.forward(query, key, value, None, Arguments(), True)
    assert lse is not None
    upstream = torch.randn_like(output)
    call = (query, key, value)
    want = kernels.backward(upstream, *call, output, lse, None, Arguments())
    moved = output.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.stack([lse, lse], -1)[..., 0]
    got = kernels.backward(upstream, *call, moved, spread, None, Arguments())
    for a, b in zip(got[:3], want[:3], strict=True):
        assert torch.equal(a, b)


REDUCED: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    *[((), None), ((S,), None), ((1,), None), ((S, S), None), ((S, 1), None), ((1, S), None)],
    *[((3, 1, S), None), ((2, 1, 1, S), None), ((1, 3, S, 1), None), ((2, 3, S, S), None)],
    *[((1, S), (S, S)), ((1, 1), (S, S)), ((3, 1, 1), (3, S, S)), ((1, 1, S, S), (2, 3, S, S))],
    *[((2, 1, 1, S), (2, 3, S, S)), ((1, 1, 1, S), (2, 1, 1, S)), ((), (S,))],
]


@pytest.mark.parametrize("shape,expanded", REDUCED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_reduced_is_what_broadcasting_gives(
    shape: tuple[int, ...], expanded: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    base = torch.zeros(shape, dtype=dtype, requires_grad=True)
    mask = base if expanded is None else base.expand(expanded)
    gradient = randn(2, 3, S, S)
    reduced = kernels.reduced(gradient, mask.detach())
    assert reduced.shape == mask.shape and reduced.dtype == dtype
    (got,) = torch.autograd.grad(mask, base, reduced)
    wide = base.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(wide.expand(gradient.shape), wide, gradient)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    close(got, want, tolerance)


# ----------------------------------------------------------------------------------- plain PyTorch


def test_reference_dropout_comes_from_the_seed() -> None:
    query, key, _ = qkv(2, (4, 2, 2))
    value = torch.eye(S, dtype=torch.float64).expand(2, 4, S, S)
    arguments = Arguments(dropout_p=0.4)

    def run(seed: int) -> Tensor:
        call = (query, key, value, None, arguments, torch.tensor(seed))
        output, lse = kernels.reference_forward(*call)
        found = kernels.reference_backward(
            value, query, key, value, output, lse, None, arguments, torch.tensor(seed)
        )
        assert isinstance(found, Gradients) and found.bias is None
        close(found.value, output.mT)  # the weights, dropped the same way
        return output

    state = torch.get_rng_state()
    first = run(5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run(5), first)
    assert not torch.equal(run(6) == 0, first == 0)


# --------------------------------------------------------------------------------------- decisions

BASE = Arguments(0.1, False, 0.5, False, 100)


def signature() -> dict[str, Any]:
    query, key, value = (t.float() for t in qkv(2))
    return {
        "query": query,
        "key": key,
        "value": value,
        "bias": torch.zeros(2, 1, S, S),
        "arguments": BASE,
        "gradient": True,
        "bias_gradient": False,
        "aten": False,
    }


def restrided(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def moved(tensor: Tensor) -> Tensor:
    """The same layout, 4 bytes further."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no_bias": lambda g: {"bias": None},
    "bias_shape": lambda g: {"bias": g["bias"][:, 0, 0]},
    "bias_stride": lambda g: {"bias": g["bias"].mT},
    "bias_dtype": lambda g: {"bias": g["bias"].half()},
    "dropout_p": lambda g: {"arguments": BASE._replace(dropout_p=0.2)},
    "is_causal": lambda g: {"arguments": BASE._replace(is_causal=True)},
    "scale": lambda g: {"arguments": BASE._replace(scale=None)},
    "deterministic": lambda g: {"arguments": BASE._replace(deterministic=True)},
    "workspace_limit": lambda g: {"arguments": BASE._replace(workspace_limit=None)},
    "gradient": lambda g: {"gradient": False},
    "bias_gradient": lambda g: {"bias_gradient": True},
    "aten": lambda g: {"aten": True},
    **{
        f"{name}_{what}": lambda g, name=name, change=change: {name: change(g[name])}
        for name in ("query", "key", "value")
        for what, change in {
            "shape": lambda t: t[:, :2],
            "stride": restrided,
            "dtype": lambda t: t.double(),
            "address": moved,
        }.items()
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_in_one_thing_is_decided_anew(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[tuple[Any, ...]] = []
    options = Options()

    def decide(*call: Any) -> Decision:
        decided.append(call)
        return Decision(options, outline(call[0], call[2], options))

    monkeypatch.setattr(kernels, "_decide", decide)
    base = signature()
    other = base | CHANGES[change](base)
    first = kernels.find(*base.values())
    assert kernels.find(*(signature() | {"bias": base["bias"]}).values()) is first
    assert len(decided) == 1
    second = kernels.find(*other.values())
    assert second is not first and len(decided) == 2
    assert all(a is b for a, b in zip(decided[1], other.values(), strict=True))
    assert kernels.find(*base.values()) is first
    assert kernels.find(*other.values()) is second
    assert len(decided) == 2


@pytest.mark.parametrize("rule,kept", [("capture", False), ("device", True)])
def test_what_may_not_hold_next_time_is_not_kept(
    rule: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options()
    monkeypatch.setattr(
        kernels,
        "_decide",
        lambda q, k, v, *_: Decision(options, outline(q, v, options), reasons=(Reason(rule, ""),)),
    )
    call = signature()
    assert (kernels.find(*call.values()) is kernels.find(*call.values())) == kept


def test_decisions_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options()
    monkeypatch.setattr(dispatch, "MAX_DECISIONS", 3)
    monkeypatch.setattr(
        kernels, "_decide", lambda q, k, v, *_: Decision(options, outline(q, v, options))
    )
    call = signature()
    for number in range(10):
        kernels.find(*(call | {"arguments": Arguments(workspace_limit=number)}).values())
        assert len(kernels._decisions) <= 3
