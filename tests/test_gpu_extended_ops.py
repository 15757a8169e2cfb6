"""Padded, packed and paged calls by their operators, on the GPU: values, and compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import cudnn_sdpa, cudnn_sdpa_paged, cudnn_sdpa_varlen, traced
from tests import test_gpu_packed
from tests.oracle import Call, Results, assert_right
from tests.support import no_waits
from tests.test_gpu_extended import BAND, lens, manner, spoiled
from tests.test_gpu_ops import assert_dropped_alike, near, the_compilers_own
from tests.test_gpu_packed import paged, varlen_case
from tests.test_gpu_values import FP16, call, randn

pytestmark = pytest.mark.gpu

H, D = 4, 64
__all__ = ["manner"]

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls become operators as if a compiler looked on."""
    monkeypatch.setattr(traced, "applies", lambda tensors, return_lse: True)


def by_operators(case: Call, *, gradients: bool = True, **options: Any) -> Results:
    """Output and gradients, or output and LSE; anything but cuDNN raises."""
    leaves = case.leaves()
    given = {"fallback": False, **case.options, **case._sinks(leaves), **options}
    tensors = (*leaves[:3], case._mask(leaves))
    if not gradients:
        with torch.no_grad():
            output, lse = cudnn_sdpa(*tensors, return_lse=True, **given)
        return {"output": output, "lse": lse}
    output = cudnn_sdpa(*tensors, **given)
    found = torch.autograd.grad(output, leaves, case.grad_output)
    return {"output": output.detach(), **dict(zip(case.names, found, strict=True))}


def right(case: Call) -> None:
    """Both with a gradient in view and without."""
    assert_right(case, results=by_operators)
    assert_right(case, gradients=False, results=by_operators)


LENGTHS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "keys": lambda: {"seq_lens_kv": lens(333, 64)},
    "both": lambda: {"seq_lens_q": lens(100, 7), "seq_lens_kv": lens(40, 333)},
    "empty": lambda: {"seq_lens_q": lens(0, 50), "seq_lens_kv": lens(100, 0)},
}


@pytest.mark.usefixtures("operators", "manner")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("band", ["none", "causal", "bottom right window"])
def test_lengths(band: str, lengths: str) -> None:
    case = call((8, 2, 2), (100, 333), **BAND[band], **LENGTHS[lengths]())
    right(spoiled(case))
    case = call((4, 4, 4), (100, 333), dtype=FP16, **BAND[band], **LENGTHS[lengths]())
    case.sinks = torch.randn(4, device="cuda")
    right(spoiled(case))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("band", BAND)
def test_bands(band: str) -> None:
    for scores in ({}, {"softcap": 2.0}, {"alibi": True}):
        if (BAND[band] | scores).keys() - {"is_causal"}:  # others are PyTorch's calls
            right(call((8, 2, 2), (200, 333), **BAND[band], **scores))


@pytest.mark.usefixtures("operators", "manner")
def test_masks_head_dimensions_and_scales() -> None:
    lengths = LENGTHS["both"]()
    for shape in ((2, 1, 100, 333), (4, 1, 333)):
        mask = randn(*shape, dtype=torch.float32).requires_grad_()
        right(spoiled(call(lengths=(100, 333), mask=mask, **lengths)))
    right(spoiled(call(lengths=(100, 333), dims=(100, 36), is_causal=True, **lengths)))
    for scale in (-0.3, 0.0):
        right(spoiled(call(lengths=(100, 333), scale=scale, **lengths)))


@pytest.mark.usefixtures("operators", "manner")
@pytest.mark.parametrize("heads", [(4, 4, 4), (8, 2, 2)], ids=str)
def test_one_query(heads: tuple[int, int, int]) -> None:
    right(spoiled(call(heads, (1, 333), seq_lens_kv=lens(333, 65))))
    case = call(heads, (1, 333), seq_lens_kv=lens(200, 1))
    case.sinks = torch.randn(heads[0], device="cuda")
    assert_right(spoiled(case), gradients=False, results=by_operators)


def packed(case: Call, *, gradients: bool = True, **options: Any) -> Results:
    with torch.set_grad_enabled(gradients):
        return test_gpu_packed.packed(case, gradients=gradients, lse=not gradients, **options)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("band", ["none", "causal", "bottom right window"])
@pytest.mark.parametrize("gaps", [0, 5])
def test_packed(band: str, gaps: int) -> None:
    for lengths_q, lengths_kv, dims in (
        ((100, 250, 1), (201, 77, 130), (64, 64)),
        ((0, 33, 10, 128, 7), (10, 77, 0, 128, 1), (40, 24)),
    ):
        case = varlen_case(lengths_q, lengths_kv, (4, 2, 2), dims, **BAND[band])
        assert_right(case, results=packed, gaps=gaps)
        assert_right(case, results=packed, gaps=gaps, gradients=False)
    case = varlen_case((100, 33, 9), (100, 64, 7), (4, 2, 2), **BAND[band])
    case.sinks = torch.randn(4, device="cuda")
    assert_right(case, results=packed, gaps=gaps)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("queries", [1, 5, 200])
def test_pages(queries: int) -> None:
    case = call((8, 2, 2), (queries, 333), seq_lens_kv=lens(333, 70))
    assert_right(case, gradients=False, results=paged)
    case.sinks = torch.randn(8, device="cuda")
    case.options |= {"is_causal": True, "causal_alignment": "bottom_right"}
    assert_right(case, gradients=False, results=paged)


# ---------------------------------------------------------------------------------- compiled code


def same_as_eager(function: Function, compiled: Function, *leaves: Tensor, rest: Any = ()) -> None:
    """Output and gradients are those of the same function as it is."""
    got, want = compiled(*leaves, *rest), function(*leaves, *rest)
    near(got.detach(), want.detach())
    upstream = torch.randn_like(want)
    # A replay overwrites what it returned: look at it before the next.
    found = torch.autograd.grad(got, leaves, upstream)
    for one, other in zip(found, torch.autograd.grad(want, leaves, upstream), strict=True):
        near(one, other)


def padded_block(tokens: Tensor, sinks: Tensor, lengths: Tensor) -> Tensor:
    query, key, value = tokens.mul(1.5).permute(2, 0, 3, 1, 4).unbind()
    output: Any = cudnn_sdpa(
        query,
        key,
        value,
        is_causal=True,
        window=(100, -1),
        sinks=sinks,
        seq_lens_q=lengths,
        seq_lens_kv=lengths,
        fallback=False,
    )
    result: Tensor = output.transpose(1, 2).flatten(2)
    return result


def packed_block(tokens: Tensor, starts: Tensor, longest: int) -> Tensor:
    query, key, value = tokens.mul(1.5).unbind(1)
    output: Any = cudnn_sdpa_varlen(
        query, key, value, starts, starts, longest, longest, is_causal=True, fallback=False
    )
    result: Tensor = output.flatten(1)
    return result


@the_compilers_own
def test_padded_batches_by_inductor() -> None:
    compiled = torch.compile(padded_block, fullgraph=True, dynamic=True)
    sinks = torch.randn(H, device="cuda").requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in ((2, 129), (3, 200), (5, 500)):
            tokens = randn(batch, length, 3, H, D).requires_grad_()
            lengths = torch.randint(1, length + 1, (batch,), device="cuda")
            same_as_eager(padded_block, compiled, tokens, sinks, rest=(lengths,))


@the_compilers_own
def test_packed_batches_by_inductor() -> None:
    compiled = torch.compile(packed_block, fullgraph=True, dynamic=True)
    for lengths in ((100, 30), (7, 200, 65), (300, 1, 1, 40, 6)):
        starts = test_gpu_packed.starts(lens(*lengths))
        tokens = randn(sum(lengths), 3, H, D).requires_grad_()
        same_as_eager(packed_block, compiled, tokens, rest=(starts, max(lengths)))


@the_compilers_own
def test_reduce_overhead_replays_right_values() -> None:
    compiled = torch.compile(padded_block, fullgraph=True, mode="reduce-overhead")
    tokens = randn(2, 200, 3, H, D).requires_grad_()
    sinks = torch.randn(H, device="cuda").requires_grad_()
    lengths = lens(200, 10)
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        tokens.data.normal_()
        lengths.copy_(lens(200 - 30 * step, 10 + 30 * step))
        same_as_eager(padded_block, compiled, tokens, sinks, rest=(lengths,))


@the_compilers_own
def test_compiled_steps_do_not_wait() -> None:
    compiled = torch.compile(padded_block, fullgraph=True, backend="aot_eager")
    tokens, sinks = randn(2, 200, 3, H, D).requires_grad_(), torch.randn(H, device="cuda")
    lengths, upstream = lens(200, 10), randn(2, 200, H * D)
    torch.autograd.grad(compiled(tokens, sinks, lengths), tokens, upstream)
    with no_waits():
        torch.autograd.grad(compiled(tokens, sinks, lengths), tokens, upstream)


@the_compilers_own
def test_compiled_decoding_from_pages() -> None:
    pool = randn(40, 2, 16, D), randn(40, 2, 16, D)
    table = torch.randperm(40, device="cuda")[:30].view(2, 15)

    def decode(query: Tensor, lengths: Tensor) -> Any:
        return cudnn_sdpa_paged(query, *pool, table, lengths, return_lse=True, fallback=False)

    compiled = torch.compile(decode, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(6):
            query, lengths = randn(2, 8, 1, D), lens(30 + 30 * step, 240 - step)
            torch.compiler.cudagraph_mark_step_begin()
            for one, other in zip(compiled(query, lengths), decode(query, lengths), strict=True):
                near(one, other)


@the_compilers_own
def test_compiled_dropout_of_backward_is_that_of_forward() -> None:
    lengths = torch.full((8,), 128, device="cuda")
    assert_dropped_alike(
        lambda *t: cudnn_sdpa(*t, dropout_p=0.25, seq_lens_kv=lengths, fallback=False), 0.25
    )
