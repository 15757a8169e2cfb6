"""Who computes the cases that take more than PyTorch's function does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.data import Data
from cudnn_mha import cudnn_sdpa, cudnn_sdpa_paged, cudnn_sdpa_varlen

Call = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def bind(name: str, case: Case, data: Data) -> Call:
    """The peer's call with the case's arguments; compilers start afresh.

    Raises:
        Exception: the peer is not there.
    """
    if name == "ours":
        return _packed(case, data) if case.layout == "packed" else _ours(case, data)
    if name == "paged":
        return _paged(data)
    if name == "varlen":
        return _varlen(case, data)
    if name == "flex":
        return _flex(case, data)
    if name == "copy":
        return _copy(data)
    return lambda q, k, v, mask: F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=case.causal, enable_gqa=case.gqa
    )


def _ours(case: Case, data: Data) -> Call:
    options: dict[str, Any] = {
        "is_causal": case.causal,
        "enable_gqa": case.gqa,
        "softcap": case.softcap,
        "window": None if case.window is None else (case.window, 0),
        "seq_lens_q": data.lengths if case.layout == "padded" else None,
        "seq_lens_kv": data.lengths,
        "fallback": False,
    }

    def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # The lengths say what others need the mask for.
        output: Tensor = cudnn_sdpa(q, k, v, **options)
        return output

    return ours


def _packed(case: Case, data: Data) -> Call:
    bounds, longest = data.bounds, data.longest
    assert bounds is not None

    def packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        output = cudnn_sdpa_varlen(
            q, k, v, bounds, bounds, longest, longest, is_causal=case.causal, fallback=False
        )
        assert isinstance(output, Tensor)
        return output

    return packed


def _paged(data: Data) -> Call:
    pages, lengths = data.pages, data.lengths
    assert pages is not None and lengths is not None

    def paged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        output = cudnn_sdpa_paged(q, pages.key, pages.value, pages.table, lengths, fallback=False)
        assert isinstance(output, Tensor)
        return output

    return paged


def _varlen(case: Case, data: Data) -> Call:
    operator: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    bounds, longest = data.bounds, data.longest
    window = (-1, 0 if case.causal else -1)

    def varlen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = operator(q, k, v, bounds, bounds, longest, longest, window_size=window)
        return output

    return varlen


def _flex(case: Case, data: Data) -> Call:
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    aot: Any = importlib.import_module("torch._functorch.config")
    aot.donated_buffer = False  # else its backward cannot be called twice
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.compile_threads = 1  # no processes beside the one that measures
    torch._dynamo.reset()  # else many cases use up how often one function is compiled
    compiled: Any = torch.compile(module.flex_attention, dynamic=False)
    options: dict[str, Any] = {}
    bound, window = case.softcap, case.window
    if bound is not None:

        def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return bound * torch.tanh(score / bound)

        options["score_mod"] = capped
    if case.causal:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j if window is None else (i >= j) & (i - j <= window)

        options["block_mask"] = module.create_block_mask(
            visible, None, None, case.seq_q, case.seq_kv, device=data.leaves[0].device
        )

    def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = compiled(q, k, v, **options)
        return output

    return flex


def _copy(data: Data) -> Call:
    to = torch.empty_like(data.leaves[1])
    return lambda q, k, v, mask: to.copy_(k)
