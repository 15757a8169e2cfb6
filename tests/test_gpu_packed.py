"""Packed sequences and keys in pages on the GPU, against the same padded call in float64.

``CUDNN_MHA_CALLS`` sets how many random calls are made (default 240), ``CUDNN_MHA_SEED`` which.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import (
    CudnnSdpaUnsupportedError,
    cache_clear,
    cache_info,
    cudnn_sdpa_paged,
    cudnn_sdpa_varlen,
    reference_layouts,
)
from tests.oracle import Call, Results, assert_right, failures
from tests.test_gpu_extended import BAND, SCORES, lens, right_or_refused
from tests.test_gpu_values import BF16, FP16, call, randn

pytestmark = pytest.mark.gpu

CALLS = int(os.environ.get("CUDNN_MHA_CALLS", "240"))
SEED = int(os.environ.get("CUDNN_MHA_SEED", "0"))
CHUNKS = 24


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def varlen_case(
    lengths_q: tuple[int, ...],
    lengths_kv: tuple[int, ...],
    heads: tuple[int, int, int] = (8, 2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    **options: Any,
) -> Call:
    """The padded call that says the same as the packed one."""
    longest = max(*lengths_q, 1), max(*lengths_kv, 1)
    case = call(heads, longest, dims, len(lengths_q), dtype, **options)
    case.options |= {"seq_lens_q": lens(*lengths_q), "seq_lens_kv": lens(*lengths_kv)}
    return case


def starts(lengths: Tensor, gaps: int = 0) -> Tensor:
    """Where slots with room for ``gaps`` more tokens start and end."""
    return torch.nn.functional.pad((lengths + gaps).cumsum(0), (1, 0))


def packed(
    case: Call,
    *,
    gradients: bool = True,
    gaps: int = 0,
    tail: int = 3,
    kind: torch.dtype = torch.int32,
    fused: bool = False,
    fallback: bool = False,
    lse: bool = True,
) -> Results:
    """Output, LSE and gradients of a padded call by packing it; anything but cuDNN raises.

    Args:
        case: the padded call.
        gradients: those too.
        gaps: tokens of NaN behind each sequence.
        tail: tokens of NaN behind the last one.
        kind: dtype of what says where sequences start.
        fused: query, key and value are views of one buffer, which takes lengths that are equal.
        fallback: PyTorch may compute it.
        lse: the log-sum-exp is asked for.
    """
    options = dict(case.options)
    lengths = options.pop("seq_lens_q"), options.pop("seq_lens_kv")
    options.pop("enable_gqa", None)
    cu = [starts(n, gaps) for n in lengths]

    def places(side: int, tensor: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(tensor.shape[2], device="cuda")
        real = index < lengths[side][:, None]
        return real, (cu[side][:-1, None] + index)[real]

    def pack(tensor: Tensor, side: int) -> Tensor:
        real, where = places(side, tensor)
        tokens = int(cu[side][-1]) + tail
        flat = tensor.new_full((tokens, *tensor.shape[1::2]), torch.nan)
        flat[where] = tensor.detach().transpose(1, 2)[real]
        return flat

    def unpack(flat: Tensor, side: int, like: Tensor, rest: float = 0.0) -> Tensor:
        real, where = places(side, like)
        result = flat.new_full((*real.shape, *flat.shape[1:]), rest)
        result[real] = flat[where]
        beyond = torch.ones(flat.shape[0], dtype=torch.bool, device="cuda")
        beyond[where] = False
        assert (flat[beyond] == rest).all()
        return result.transpose(1, 2)

    flats = [pack(t, side) for t, side in ((case.query, 0), (case.key, 1), (case.value, 1))]
    if fused:
        buffer = torch.cat(flats, 1)
        flats = list(buffer.split([t.shape[1] for t in flats], 1))
    leaves = [t.detach().requires_grad_(gradients) for t in flats]
    if case.sinks is not None:
        options["sinks"] = case.sinks.detach().requires_grad_(gradients)
        leaves.append(options["sinks"])
    if gaps:
        options |= {"seq_lens_q": lengths[0], "seq_lens_kv": lengths[1]}
    found: Any = cudnn_sdpa_varlen(
        *leaves[:3],
        cu[0].to(kind),
        cu[1].to(kind),
        case.query.shape[2],
        case.key.shape[2],
        return_lse=lse,
        fallback=fallback,
        **options,
    )
    output = found[0] if lse else found
    results = {"output": unpack(output.detach(), 0, case.query)}
    if lse:
        results["lse"] = unpack(found[1].detach().T, 0, case.query, -torch.inf)
    if gradients:
        assert case.grad_output is not None
        found = torch.autograd.grad(output, leaves, pack(case.grad_output, 0))
        sides = ((0, case.query), (1, case.key), (1, case.value))
        for name, gradient, (side, like) in zip(case.names, found, sides, strict=False):
            results[name] = unpack(gradient, side, like)
        if case.sinks is not None:
            results["grad_sinks"] = found[-1]
    return results


@pytest.mark.parametrize("band", BAND)
@pytest.mark.parametrize("scores", SCORES)
def test_packed(band: str, scores: str) -> None:
    for lengths_q, lengths_kv in (
        ((100, 250, 1), (201, 77, 130)),
        ((0, 33, 10, 128, 7), (10, 77, 0, 128, 1)),
    ):
        for heads, dim in (((4, 4, 4), 64), ((8, 2, 2), 128)):
            case = varlen_case(
                lengths_q, lengths_kv, heads, (dim, dim), **BAND[band], **SCORES[scores]
            )
            right_or_refused(case, results=packed)
            right_or_refused(case, gradients=False, results=packed)


@pytest.mark.parametrize("dims", [(8, 8), (40, 24), (64, 128), (20, 20), (192, 128), (256, 256)])
def test_packed_head_dims(dims: tuple[int, int]) -> None:
    case = varlen_case((100, 33, 260), (100, 33, 260), (4, 2, 1), dims, FP16, is_causal=True)
    assert_right(case, results=packed)


@pytest.mark.parametrize("lengths", [(100, 1, 260, 64), (250, 256, 200, 256)], ids=str)
def test_packed_views_gaps_and_int64(lengths: tuple[int, ...]) -> None:
    """The workspace of the first is bounded, of the second not."""
    case = varlen_case(lengths, lengths, (4, 2, 2), is_causal=True)
    for options in (
        {"fused": True},
        {"gaps": 5},
        {"kind": torch.int64},
        {"fused": True, "gaps": 2, "tail": 0},
    ):
        assert (options, failures(case, results=packed, **options)) == (options, [])


def test_packed_single_queries() -> None:
    """Decoding, as packed batches have it."""
    for heads in ((4, 4, 4), (8, 2, 2)):
        assert_right(varlen_case((1, 1, 1), (700, 1, 65), heads), results=packed)
        case = varlen_case((1, 0, 1), (700, 33, 65), heads)
        assert_right(case, gradients=False, results=packed)


def test_packed_gradients_are_bit_equal() -> None:
    case = varlen_case((300, 77, 512), (300, 77, 512), is_causal=True, deterministic=True)
    case.grad_output = randn(3, 8, 512, 64)
    first = packed(case)
    for _ in range(5):
        again = packed(case)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_packed_sinks() -> None:
    case = varlen_case((100, 33, 1), (100, 64, 7), is_causal=True)
    case.sinks = torch.randn(8, device="cuda")
    assert_right(case, gradients=False, results=packed)
    assert_right(case, results=packed)


def test_gradient_of_the_packed_log_sum_exp() -> None:
    starts = torch.tensor([0, 100, 100, 133, 400], device="cuda", dtype=torch.int32)
    query, key, value = randn(400, 8, 64), randn(400, 2, 64), randn(400, 2, 64)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    output, lse = cudnn_sdpa_varlen(
        *leaves, starts, starts, 267, 267, is_causal=True, return_lse=True, fallback=False
    )
    want, sums = reference_layouts.varlen(*exact, starts, starts, is_causal=True)
    upstream = torch.randn_like(want), torch.randn_like(sums)
    found = torch.autograd.grad((output * upstream[0]).sum() + (lse * upstream[1]).sum(), leaves)
    wanted = torch.autograd.grad((want * upstream[0]).sum() + (sums * upstream[1]).sum(), exact)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= 6e-3 * other.norm()


def test_one_plan_for_many_packed_batches() -> None:
    cache_clear()
    rng = random.Random(0)
    for _ in range(12):
        lengths = tuple(rng.randint(1, 250) for _ in range(rng.randint(5, 8)))
        lengths = (250, 200, 200, 200, *lengths)[: len(lengths)]
        assert_right(varlen_case(lengths, lengths, is_causal=True), results=packed)
    assert cache_info().builds <= 6


def paged(
    case: Call,
    *,
    gradients: bool = False,
    size: int = 16,
    layout: str = "HND",
    kind: torch.dtype = torch.int32,
) -> Results:
    """Output and LSE of a padded call whose keys and values are put into pages."""
    options = dict(case.options)
    lengths = options.pop("seq_lens_kv")
    options.pop("enable_gqa", None)
    batch, longest = case.key.shape[0], case.key.shape[2]
    columns = -(-longest // size) + 1
    table = torch.randperm(batch * columns + 5, device="cuda")[: batch * columns]
    table = table.view(batch, columns)

    def pages(tensor: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(tensor, (0, 0, 0, columns * size - longest))
        index = torch.arange(columns * size, device="cuda")
        filled = filled.masked_fill((index >= lengths[:, None])[:, None, :, None], 0)
        rows = filled.unflatten(2, (columns, size)).transpose(1, 2)
        pool = tensor.new_zeros(batch * columns + 5, *rows.shape[2:])
        pool[table.flatten()] = rows.flatten(0, 1)
        return pool if layout == "HND" else pool.transpose(1, 2).contiguous()

    used = torch.arange(columns, device="cuda") * size < lengths[:, None]
    output, lse = cudnn_sdpa_paged(
        case.query,
        pages(case.key),
        pages(case.value),
        torch.where(used, table, -7).to(kind),
        lengths,
        return_lse=True,
        fallback=False,
        page_layout=layout,
        sinks=case.sinks,
        **({"causal_alignment": "top_left"} | options),
    )
    return {"output": output, "lse": lse}


@pytest.mark.parametrize("queries", [1, 5, 200])
@pytest.mark.parametrize("band", BAND)
def test_pages(queries: int, band: str) -> None:
    for heads in ((4, 4, 4), (8, 2, 2), (8, 1, 1)):
        case = call(heads, (queries, 333), (128, 128), 3, **BAND[band])
        for lengths in ((333, 250, 200), (17, 0, 1)):
            case.options["seq_lens_kv"] = lens(*lengths)
            assert_right(case, gradients=False, results=paged)


@pytest.mark.parametrize("queries", [1, 5])
def test_pages_and_sinks(queries: int) -> None:
    case = call((8, 2, 2), (queries, 333), (128, 128), 3, **BAND["bottom right"])
    case.options["seq_lens_kv"] = lens(333, 0, 20)
    case.sinks = torch.randn(8, device="cuda")
    assert_right(case, gradients=False, results=paged)


@pytest.mark.parametrize("size", [1, 8, 16, 64, 128])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_page_sizes(size: int, layout: str, dim: int) -> None:
    for queries in (1, 30):
        case = call((8, 2, 2), (queries, 300), (dim, dim), 2, FP16, **BAND["bottom right"])
        case.options["seq_lens_kv"] = lens(300, 129)
        assert_right(case, gradients=False, results=paged, size=size, layout=layout)
        kinds = {"size": size, "layout": layout, "kind": torch.int64}
        assert_right(case, gradients=False, results=paged, **kinds)


def test_pages_of_a_padded_prompt() -> None:
    case = call((8, 2, 2), (64, 300), (128, 128), 3, **BAND["bottom right"])
    case.options |= {"seq_lens_q": lens(64, 1, 0), "seq_lens_kv": lens(300, 1, 65)}
    assert_right(case, gradients=False, results=paged)


def random_case(rng: random.Random) -> Call:
    batch = rng.choice([1, 2, 3, 5, 9])
    heads_kv = rng.choice([1, 2, 3])
    heads = heads_kv * rng.choice([1, 1, 2, 4])
    longest = rng.choice([1, 17, 64, 200, 384]), rng.choice([1, 16, 129, 192, 500])
    lengths = [
        tuple(rng.choice([0, 1, n, rng.randint(0, n)]) for _ in range(batch)) for n in longest
    ]
    if rng.random() < 0.4:
        lengths[1] = lengths[0]
    dim = rng.choice([8, 32, 40, 64, 64, 128, 128, 192, 256])
    options = dict(rng.choice([{}, *BAND.values()]))
    options |= rng.choice([{}, {}, *SCORES.values()])
    dtype = rng.choice([BF16, FP16])
    case = varlen_case(*lengths, (heads, heads_kv, heads_kv), (dim, dim), dtype, **options)
    if rng.random() < 0.15:
        case.sinks = torch.randn(heads, device="cuda")
    return case


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_packed_calls(chunk: int) -> None:
    wrong = []
    for number in range(chunk, CALLS, CHUNKS):
        rng = random.Random(SEED * 1_000_003 + number)
        torch.manual_seed(rng.getrandbits(32))
        case = random_case(rng)
        options: dict[str, Any] = {
            "gaps": rng.choice([0, 0, 3]),
            "tail": rng.choice([0, 1, 40]),
            "kind": rng.choice([torch.int32, torch.int64]),
        }
        gradients = rng.random() < 0.7
        try:
            found = failures(case, gradients=gradients, results=packed, **options)
        except CudnnSdpaUnsupportedError as error:
            rules = {reason.rule for reason in error.reasons}
            known = {"cudnn", "empty", "single_token", "score_operations"}
            found = [] if rules <= known else [str(error)]
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            shapes = [tuple(t.shape) for t in (case.query, case.key, case.value)]
            wrong.append(f"{number}: {shapes} {case.query.dtype} {case.options}: {found}")
    assert not wrong, "\n".join(wrong)
