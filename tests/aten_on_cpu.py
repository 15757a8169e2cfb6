"""PyTorch's cuDNN operators on the CPU, which has none: our reference stands in for the kernels.

PyTorch's rules and rings for these operators are then run as they are, without a GPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from cudnn_mha import backend, kernels
from cudnn_mha.kernels import Arguments


class Seen(NamedTuple):
    """What an operator was called with: shape and stride of every tensor."""

    name: str
    layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    is_causal: bool


calls: list[Seen] = []
"""All calls so far."""


def _see(name: str, is_causal: bool, **tensors: Tensor) -> None:
    layouts = {n: (tuple(t.shape), tuple(t.stride())) for n, t in tensors.items()}
    calls.append(Seen(name, layouts, is_causal))


@functools.cache
def install() -> Library:
    library = Library("aten", "IMPL")
    library.impl(backend.FORWARD, _forward, "CPU")
    library.impl(backend.BACKWARD, _backward, "CPU")
    return library


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _see("forward", is_causal, query=query, key=key, value=value)
    arguments = Arguments(dropout_p, is_causal, scale)
    output, lse = kernels.reference_forward(query, key, value, attn_bias, arguments)
    seed = torch.zeros((), dtype=torch.int64)
    kept = lse if compute_log_sumexp else None
    return output, kept, None, None, query.shape[2], key.shape[2], seed, seed.clone(), None


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    given = {"grad_out": grad_out, "out": out, "logsumexp": logsumexp}
    _see("backward", is_causal, query=query, key=key, value=value, **given)
    arguments = Arguments(dropout_p, is_causal, scale)
    found = kernels.reference_backward(
        grad_out, query, key, value, out, logsumexp, attn_bias, arguments
    )
    return found.query, found.key, found.value
