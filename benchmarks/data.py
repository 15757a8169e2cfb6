"""The tensors of a case, and what attention must make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import PAGE, Case, drawn_lengths, key_lengths
from cudnn_mha import reference


@dataclass
class Pages:
    """Keys and values cut into pages, which lie in random order."""

    key: Tensor
    value: Tensor
    table: Tensor


@dataclass
class Data:
    """Inputs of a case, its output's gradient, and the reference's output and gradients.

    Attributes:
        lengths: of the sequences, ``(B,)`` int32.
        bounds: of packed sequences, ``(B + 1,)`` int32.
        longest: the largest of the lengths.
        pages: the same keys and values for those who read pages.
        real: rows of the output that are no padding; what stands in the others is not compared.
    """

    leaves: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    grad_output: Tensor
    expected: list[Tensor]
    lengths: Tensor | None = None
    bounds: Tensor | None = None
    longest: int = 0
    pages: Pages | None = None
    real: Tensor | None = None


def make_data(case: Case, device: str = "cuda") -> Data:
    """Random inputs and what they should give.

    The reference is the definition in float64 where a case takes more than PyTorch's function
    does, else PyTorch's FlashAttention, with a mask its mathematics. All but FlashAttention see
    one sequence at a time, for want of memory. Dropout is left out.
    """
    torch.manual_seed(0)
    if case.extended:
        return _extended(case, device)
    b = case.batch
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    query = torch.randn(b, case.heads, case.seq_q, case.dim, **options)
    key = torch.randn(b, case.kv_heads, case.seq_kv, case.dim, **options)
    value = torch.randn_like(key)
    mask = None
    if case.mask == "full":
        mask = torch.randn(b, 1, case.seq_q, case.seq_kv, **options)
    elif case.mask == "keys":
        lengths = torch.tensor(key_lengths(case), device=device)
        mask = torch.arange(case.seq_kv, device=device) < lengths.view(b, 1, 1, 1)
    grad_output = torch.randn_like(query)
    inputs = (query, key, value)
    parts = []
    step = 1 if mask is not None else b
    with sdpa_kernel(SDPBackend.MATH if mask is not None else SDPBackend.FLASH_ATTENTION):
        for at in range(0, b, step):
            some = slice(at, at + step)
            leaves = _leaves(case, *(t[some] for t in inputs))
            bias = None if mask is None else mask[some]
            output = F.scaled_dot_product_attention(
                *leaves, bias, is_causal=case.causal, enable_gqa=case.gqa
            )
            gradients: Sequence[Tensor] = ()
            if case.backward:
                gradients = torch.autograd.grad(output, leaves, grad_output[some])
            parts.append([output.detach(), *gradients])
    expected = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    return Data(_leaves(case, *inputs), mask, grad_output, expected)


def _leaves(case: Case, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (t.detach().requires_grad_(case.backward) for t in tensors)
    return query, key, value


def _extended(case: Case, device: str) -> Data:
    b, longest = case.batch, case.seq_kv
    drawn = case.layout in ("padded", "packed")
    counts = drawn_lengths(case) if drawn else [longest] * b
    starts = [sum(counts[:at]) for at in range(b + 1)]
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}

    def random(heads: int, seq: int) -> Tensor:
        if case.layout == "packed":
            return torch.randn(starts[-1], heads, case.dim, **options)
        if case.layout == "padded":
            return torch.randn(b, seq, heads, case.dim, **options).transpose(1, 2)
        return torch.randn(b, heads, seq, case.dim, **options)

    query, grad_output = (random(case.heads, case.seq_q) for _ in range(2))
    key, value = (random(case.kv_heads, case.seq_kv) for _ in range(2))
    data = Data(_leaves(case, query, key, value), None, grad_output, [])
    if case.layout is not None:
        data.lengths = torch.tensor(counts, dtype=torch.int32, device=device)
        data.longest = max(counts)
    if case.layout == "packed":
        data.bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    elif case.layout == "padded":
        assert data.lengths is not None
        data.mask = torch.arange(longest, device=device) < data.lengths.view(b, 1, 1, 1)
        data.real = data.mask.transpose(2, 3)
        grad_output.mul_(data.real)  # padding has no part in the loss
    elif case.layout == "decode":
        data.pages = _pages(case, key, value)
    data.expected = _expected(case, [query, key, value, grad_output], counts, starts)
    return data


def _pages(case: Case, key: Tensor, value: Tensor) -> Pages:
    each = case.seq_kv // PAGE
    table = torch.randperm(case.batch * each, device=key.device)

    def cut(tensor: Tensor) -> Tensor:
        shape = (case.batch, case.kv_heads, each, PAGE, case.dim)
        pages = tensor.view(shape).transpose(1, 2).flatten(0, 1)
        # Page n of the sequences in order lies in place table[n].
        return torch.empty_like(pages).index_copy_(0, table, pages)

    return Pages(cut(key), cut(value), table.view(case.batch, each).int())


def _expected(
    case: Case, tensors: Sequence[Tensor], counts: Sequence[int], starts: Sequence[int]
) -> list[Tensor]:
    """Output and gradients in float64, of one sequence and one key head at a time."""
    found = [torch.zeros_like(t, dtype=torch.float32) for t in (tensors[0], *tensors[:3])]
    group = case.heads // case.kv_heads
    window = None if case.window is None else (case.window, 0)
    for at in range(case.batch):
        count_q = counts[at] if case.layout in ("padded", "packed") else case.seq_q

        def part(tensor: Tensor, head: int, own: int, count: int, at: int = at) -> Tensor:
            """``(own, count, D)`` of a tensor, where ``own`` heads go with a key head."""
            if case.layout == "packed":
                tensor = tensor[starts[at] : starts[at + 1]].transpose(0, 1)
            else:
                tensor = tensor[at]
            return tensor[head * own : (head + 1) * own, :count]

        for head in range(case.kv_heads):
            rows, keys = (head, group, count_q), (head, 1, counts[at])
            places = [rows, keys, keys]
            leaves = [
                part(t, *place).double().requires_grad_(case.backward)
                for t, place in zip(tensors, places, strict=False)
            ]
            query, key, value = leaves
            output, _ = reference.attention(
                query, key, value, is_causal=case.causal, window=window, softcap=case.softcap
            )
            results = [output.detach()]
            if case.backward:
                results += torch.autograd.grad(output, leaves, part(tensors[3], *rows).double())
            for whole, result, place in zip(found, results, [rows, *places], strict=False):
                part(whole, *place).copy_(result)
    return found if case.backward else found[:1]
