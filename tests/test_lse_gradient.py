"""Gradients through the log-sum-exp: columns that carry them into cuDNN's backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import (
    attention,
    cudnn_sdpa,
    cudnn_sdpa_varlen,
    dispatch,
    inputs,
    lse_gradient,
    merge,
    packed,
    padded,
    reference,
    reference_layouts,
)
from cudnn_mha.cache import Slot
from cudnn_mha.inputs import Options
from cudnn_mha.spec import TensorSpec
from tests import interpreter

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> interpreter.Machine:
    return interpreter.install(monkeypatch, padded, packed)


def qkv(heads: tuple[int, int, int] = (4, 2, 1), dim: int = 16) -> list[Tensor]:
    """Leaves as models lay them out, ``(B, S, H, D)`` in memory."""
    shapes = zip(heads, (9, 12, 12), (dim, dim, dim + 8), strict=True)
    made = [torch.randn(3, s, h, d, dtype=FP16).transpose(1, 2) for h, s, d in shapes]
    return [t.requires_grad_() for t in made]


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gradients(
    output: Tensor, lse: Tensor, upstream: tuple[Tensor, Tensor], leaves: list[Tensor]
) -> list[Tensor]:
    weighted = (output * upstream[0].to(output.dtype)).sum() + (lse * upstream[1]).sum()
    return [t.double() for t in torch.autograd.grad(weighted, leaves)]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-2) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_columns_hold_the_gradient_to_the_last_bit_that_matters(dtype: torch.dtype) -> None:
    layout = TensorSpec((2, 3, 5, 8), (120, 8, 24, 1), "float16")
    value, output, grad = (
        torch.empty_strided(layout.shape, layout.stride, dtype=dtype).normal_() for _ in range(3)
    )
    lse, grad_lse = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    lse[0, 0, 0], grad_lse[0, 0, 0] = -math.inf, math.nan
    width = 8 + lse_gradient.COLUMNS
    spec: Any = type("Spec", (), {})()
    spec.value = spec.output = TensorSpec((2, 3, 5, width), (15 * width, width, 3 * width, 1), "")
    wide = lse_gradient.widen(spec, value, output, lse, grad, grad_lse)
    assert all(t.stride() == spec.value.stride for t in wide)
    assert torch.equal(wide[0][..., :8], value) and not wide[0][..., 8:].any()
    delta = (wide[1].double() * wide[2].double()).sum(-1)
    expected = (output.double() * grad.double()).sum(-1) - grad_lse.double().nan_to_num()
    torch.testing.assert_close(delta, expected, rtol=0, atol=2e-6)
    alone = lse_gradient.widen(spec, value, output, lse, None, grad_lse)
    delta = (alone[1].double() * alone[2].double()).sum(-1)
    torch.testing.assert_close(delta, -grad_lse.double().nan_to_num(), rtol=0, atol=2e-6)


CALLS: dict[str, dict[str, Any]] = {
    "window": {"window": (3, 2)},
    "soft cap": {"softcap": 2.0},
    "lengths": {"seq_lens_q": lens(9, 0, 4), "seq_lens_kv": lens(12, 3, 0)},
    "bottom right": {
        "is_causal": True,
        "causal_alignment": "bottom_right",
        "seq_lens_kv": lens(5, 12, 7),
    },
}


@pytest.mark.parametrize("by", ["both", "log-sum-exp"])
@pytest.mark.parametrize("profile", ["h200", "a100-sxm-80gb"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_of_padded_calls(
    monkeypatch: pytest.MonkeyPatch, name: str, with_sinks: bool, profile: str, by: str
) -> None:
    machine = interpreter.install(monkeypatch, padded, profile=profile)
    leaves, options = qkv(), CALLS[name]
    if with_sinks:
        leaves.append(torch.randn(4).requires_grad_())
    exact = [t.detach().double().requires_grad_() for t in leaves]
    o = dict(options)
    o["bottom_right"] = o.pop("causal_alignment", "") == "bottom_right"
    sinks = [{"sinks": t[3]} if with_sinks else {} for t in (leaves, exact)]
    want, sums = reference.attention(*exact[:3], **o, **sinks[1])
    output, lse = cudnn_sdpa(
        *leaves[:3], enable_gqa=True, return_lse=True, fallback=False, **options, **sinks[0]
    )
    # Where no key is, the log-sum-exp is -inf, which no product may meet.
    real = sums.isfinite()
    upstream = torch.randn(want.shape).to(FP16) * (by == "both"), torch.randn(sums.shape)
    found = gradients(output, lse.where(real, 0.0), upstream, leaves)
    close(found, gradients(want, sums.where(real, 0.0), upstream, exact))
    backward = machine.runs[-1]
    assert backward.backward and backward.dim_v == 24 + lse_gradient.COLUMNS


@pytest.mark.parametrize("gap", [0, 2])
def test_of_packed_calls(machine: interpreter.Machine, gap: int) -> None:
    starts = lens(0, 4, 4 + gap, 11 + gap)
    lengths = {"seq_lens_q": lens(4, 0, 7), "seq_lens_kv": lens(3, 0, 7)} if gap else {}
    shapes = ((14, 4, 16), (14, 2, 16), (14, 1, 24))
    leaves = [torch.randn(*shape).to(FP16).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want, sums = reference_layouts.varlen(*exact, starts, starts, **lengths)
    output, lse = cudnn_sdpa_varlen(
        *leaves, starts, starts, 7, 7, return_lse=True, fallback=False, **lengths
    )
    real = sums.isfinite()
    upstream = torch.randn(want.shape).to(FP16), torch.randn(sums.shape)
    found = gradients(output, lse.where(real, 0.0), upstream, leaves)
    close(found, gradients(want, sums.where(real, 0.0), upstream, exact))
    assert machine.runs[-1].dim_v == 24 + lse_gradient.COLUMNS


def dense(leaves: list[Tensor], machine: interpreter.Machine, **options: Any) -> Any:
    """Output and log-sum-exp as `cudnn_sdpa` gets them of ordinary calls on a GPU."""
    given = Options(enable_gqa=True, return_lse=True, **options)
    decision = dispatch.decide(*leaves, None, given, gradient=True, device=machine.device)
    assert isinstance(decision.forward, Slot), decision.reasons
    return attention.attend(decision, inputs.prepare(*leaves, None, given))


def test_of_ordinary_calls(machine: interpreter.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_shared_way", lambda wanted, decision: None)
    leaves = qkv()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    output, lse = dense(leaves, machine, is_causal=True)
    want, sums = reference.attention(*exact, None, 0.0, True)
    upstream = torch.randn(want.shape).to(FP16), torch.randn(sums.shape)
    close(gradients(output, lse, upstream, leaves), gradients(want, sums, upstream, exact))
    assert machine.runs[-1].dim_v == 24 + lse_gradient.COLUMNS


def test_where_cudnn_has_no_such_backward_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpreter.install(monkeypatch, padded, profile="a100-sxm-80gb")
    leaves = [torch.randn(1, 2, 16, 128, dtype=FP16).requires_grad_() for _ in range(3)]
    output, lse = cudnn_sdpa(*leaves, window=(3, 3), return_lse=True, fallback=False)
    with pytest.raises(RuntimeError, match=r"head dimensions up to 128.*Dv = 144.*Detach"):
        (output.sum() + lse.sum()).backward()


@pytest.mark.parametrize("pieces", [2, 3])
def test_attention_to_keys_in_pieces_is_the_whole(
    machine: interpreter.Machine, pieces: int
) -> None:
    """Forward and backward: what one rank of context parallelism computes of each other's keys."""
    query, key, value = qkv()
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    want, sums = reference.attention(*exact)
    keys = zip(key.chunk(pieces, 2), value.chunk(pieces, 2), strict=True)
    parts = [
        cudnn_sdpa(
            query,
            k,
            v,
            enable_gqa=True,
            return_lse=True,
            fallback=False,
            seq_lens_kv=torch.full((3,), k.shape[2]),
        )
        for k, v in keys
    ]
    output, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    torch.testing.assert_close(output.double(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=1e-3)
    upstream = torch.randn(want.shape), torch.randn(sums.shape)
    found = gradients(output, lse, upstream, [query, key, value])
    close(found, gradients(want, sums, upstream, exact), 2e-2)
