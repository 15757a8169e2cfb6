"""Where the sequences of a batch lie, and how long they are: what ragged graphs are told.

A ragged graph finds each sequence of a tensor by an offset and knows its length, both read from
device memory when it runs. So one plan serves every length up to the declared one, and no kernel
reads or writes anything beyond a sequence's end: padding may hold NaN.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from cudnn_mha.graph_builder import Uid
from cudnn_mha.spec import AttentionSpec, TensorSpec

Operands = dict[Uid, Tensor]
"""What plans are told besides query, key and value."""


OFFSETS = {
    Uid.OFFSET_QUERY: "query",
    Uid.OFFSET_KEY: "key",
    Uid.OFFSET_VALUE: "value",
    Uid.OFFSET_OUTPUT: "output",
    Uid.OFFSET_GRAD_OUTPUT: "grad_output",
    Uid.OFFSET_GRAD_QUERY: "grad_query",
    Uid.OFFSET_GRAD_KEY: "grad_key",
    Uid.OFFSET_GRAD_VALUE: "grad_value",
}
"""Whose offsets an operand holds; the log-sum-exp is no part of a spec and has its own."""

LEAST = 128
"""The shortest length that a plan is made for: shorter ones fill no tile of a kernel either."""

_QUERIES = ("query", "output", "grad_output", "grad_query")


def on_host(*tensors: Tensor) -> bool:
    """Whether the values of tensors can be looked at without waiting for a device."""
    return (
        all(type(t) is Tensor and t.is_cpu for t in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def require_starts(name: str, starts: Tensor, tokens: int) -> None:
    """Raises ValueError for starts on the host that are none; elsewhere they are not read.

    Args:
        name: the argument.
        starts: ``(B + 1,)``.
        tokens: how many there are.
    """
    if not on_host(starts):
        return
    found = starts.tolist()
    if found[0] < 0 or found[-1] > tokens:
        raise ValueError(
            f"{name} must start at 0 or more and end at {tokens}, the number of tokens, or less, "
            f"got {found[0]} and {found[-1]}"
        )
    for place, (start, end) in enumerate(itertools.pairwise(found)):
        if start > end:
            raise ValueError(f"{name} must ascend, got {start} and then {end} for sequence {place}")


def require_lengths(name: str, lengths: Tensor, most: int | list[int], what: str) -> None:
    """Raises ValueError for lengths on the host that are out of bounds; elsewhere none is read.

    Args:
        name: the argument.
        lengths: ``(B,)``.
        most: the largest that all, or each of them, may be.
        what: what that is.
    """
    if not on_host(lengths):
        return
    found = lengths.tolist()
    bounds = [most] * len(found) if isinstance(most, int) else most
    for place, (length, bound) in enumerate(zip(found, bounds, strict=True)):
        if not 0 <= length <= bound:
            raise ValueError(
                f"{name} must be from 0 to {bound}, {what}, for sequence {place}, got {length}"
            )


def require_pages(name: str, table: Tensor, lengths: Tensor, page_size: int, pages: int) -> None:
    """Raises ValueError for pages in use that are none, of a table on the host.

    Args:
        name: the argument.
        table: ``(B, M)`` the pages of each sequence in order.
        lengths: ``(B,)`` how much of them is in use.
        page_size, pages: how large they are, and how many.
    """
    if not on_host(table, lengths):
        return
    used = torch.arange(table.shape[1]) * page_size < lengths[:, None]
    wrong = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
    if wrong:
        b, m = wrong[0]
        raise ValueError(
            f"{name} must hold pages from 0 to {pages - 1} as far as they are in use, got "
            f"{int(table[b, m])} for page {m} of sequence {b}"
        )


def bucket(size: int, least: int = LEAST) -> int:
    """The size that a plan is made for which serves ``size``: the next power of two."""
    return max(least, 1 << (size - 1).bit_length())


def bucket_of_tokens(count: int) -> int:
    """Likewise for what costs work as well: at most a quarter more."""
    step = max(LEAST, bucket(count) // 8)
    return -(-count // step) * step


def declared(layout: TensorSpec, batch: int, length: int) -> TensorSpec:
    """A ragged tensor's descriptor: what the sequences of ``layout`` have in common.

    Args:
        layout: ``(B, H, S, D)`` as it lies in memory.
        batch: sequences that the graph is made for.
        length: longest sequence that it is made for.
    """
    _, heads, _, dim = layout.shape
    _, head, token, last = layout.stride
    if layout.shape[2] == 1:  # whatever stride that has, no second token follows
        token = heads * dim
    if heads == 1:
        head = dim
    return TensorSpec(
        (batch, heads, length, dim),
        (max(length * token, heads * head), head, token, last),
        layout.dtype,
    )


def ragged(spec: AttentionSpec, length_q: int, length_kv: int) -> AttentionSpec:
    """``spec``, of tensors as they lie in memory, as the ragged spec that serves them."""
    changed: dict[str, TensorSpec] = {}
    for name in OFFSETS.values():
        layout = getattr(spec, name)
        if layout is not None:
            length = length_q if name in _QUERIES else length_kv
            changed[name] = declared(layout, spec.batch, length)
    return dataclasses.replace(spec, **changed, padding=False, lengths=True, ragged=True)  # type: ignore[arg-type]


def batch_offsets(spec: AttentionSpec, device: torch.device) -> Operands:
    """Offsets of sequences that lie one batch stride apart, each ``(B + 1,)`` int64.

    Args:
        spec: the call's tensors as they lie in memory.
        device: where to make them.
    """
    by_stride: dict[int, Tensor] = {}

    def multiples(stride: int) -> Tensor:
        if stride not in by_stride:
            counts = torch.arange(spec.batch + 1, device=device)
            by_stride[stride] = counts * stride
        return by_stride[stride]

    found: Operands = {
        uid: multiples(getattr(spec, name).stride[0])
        for uid, name in OFFSETS.items()
        if getattr(spec, name) is not None
    }
    found[Uid.OFFSET_LSE] = multiples(spec.seq_q * spec.heads_q)
    return found
