"""One plan for many lengths of a dense call.

A plan is made for shapes, yet a ragged graph is told where each sequence lies and how long it is.
So a dense call of a length that has no plan can run on one that was made for any length up to the
next power of two, if no stride that a plan bakes in depends on the length:

* by token: heads lie within a token, as models have them, ``(B, S, H, D)`` in memory;
* by head: every head is a sequence of its own, which makes any memory order do. Gradients of keys
  and values that several query heads share would have to be added up, so there are none of these.

Where it is exact and what it costs was measured on sm_90 alone, so nothing of this happens on
other GPUs.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_mha import config, runtime
from cudnn_mha.devices import Device
from cudnn_mha.graph_builder import Uid
from cudnn_mha.sequences import OFFSETS, Operands, batch_offsets, bucket, ragged
from cudnn_mha.spec import AttentionSpec, TensorSpec

FEW = 3
"""Lengths of otherwise equal calls that get a plan of their own, before any is shared."""


class Way(Enum):
    """What a ragged graph takes for a sequence."""

    BY_TOKEN = "by token"
    BY_HEAD = "by head"


class Told(NamedTuple):
    """What plans for many lengths are told about one.

    Attributes:
        forward: addresses of the lengths and offsets of the forward plan.
        backward: likewise of the backward plan, before its gradients.
        gradients: of its gradients.
        by_token: the log-sum-exp lies as ``(B, Sq, Hq, 1)``.
        backward_spec: the gradients as they lie in memory.
        operands: the tensors at these addresses.
    """

    forward: list[int]
    backward: list[int]
    gradients: list[int]
    by_token: bool
    backward_spec: AttentionSpec | None
    operands: Operands


def way(specs: list[AttentionSpec], device: Device) -> Way | None:
    """How plans for many lengths can serve the forward, and the backward if there is one."""
    spec = specs[0]
    if device.sm != 90 or spec.bias is not None or spec.dropout_p or spec.modified:
        return None
    lse = spec.lse or len(specs) > 1
    tensors = [t for s in specs for name, t in s.tensors.items() if name in OFFSETS.values()]
    if all(_by_token(t) for t in tensors):
        return Way.BY_TOKEN
    alike = spec.heads_q == spec.heads_k == spec.heads_v
    return Way.BY_HEAD if alike or not lse else None


def _by_token(layout: TensorSpec) -> bool:
    _, heads, seq, _ = layout.shape
    _, head, token, _ = layout.stride
    return seq == 1 or heads == 1 or 0 < head * heads <= token


def shared(spec: AttentionSpec, way: Way) -> AttentionSpec:
    """The spec of the plan that serves ``spec`` and all up to the next power of two."""
    spec = dataclasses.replace(spec, padding=False)
    lse = spec.lse or spec.backward
    # The log-sum-exp and the gradients of a single query are wrong in ragged graphs.
    length_q = 1 if spec.seq_q == 1 and not lse else bucket(spec.seq_q)
    if way is Way.BY_HEAD:
        spec = _by_head(spec)
    return ragged(spec, length_q, bucket(spec.seq_kv))


def _by_head(spec: AttentionSpec) -> AttentionSpec:
    count = spec.batch * spec.heads_q
    changed: dict[str, Any] = {}
    for name in OFFSETS.values():
        layout = getattr(spec, name)
        if layout is not None:
            _, _, seq, dim = layout.shape
            token = layout.stride[2]
            if seq == 1:
                token = dim
            changed[name] = TensorSpec(
                (count, 1, seq, dim), (seq * token, token, token, 1), layout.dtype
            )
    return dataclasses.replace(spec, **changed)


def tell(specs: list[AttentionSpec], way: Way, device: torch.device) -> Told:
    """What the plans of `shared` are told to compute ``specs``."""
    spec = specs[-1]

    def make() -> Operands:
        if way is Way.BY_TOKEN:
            count = spec.batch
            operands = batch_offsets(spec, device)
        else:
            count = spec.batch * spec.heads_q
            operands = {
                uid: _head_offsets(getattr(spec, name), spec.heads_q, device)
                for uid, name in OFFSETS.items()
                if getattr(spec, name) is not None
            }
            operands[Uid.OFFSET_LSE] = torch.arange(count + 1, device=device) * spec.seq_q
        for uid, length in ((Uid.SEQ_LEN_Q, spec.seq_q), (Uid.SEQ_LEN_KV, spec.seq_kv)):
            operands[uid] = torch.full((count,), length, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # calls on other streams read these
        return operands

    operands = runtime.outside_pools(make)
    lengths = [Uid.SEQ_LEN_Q, Uid.SEQ_LEN_KV]
    offsets = [Uid.OFFSET_QUERY, Uid.OFFSET_KEY, Uid.OFFSET_VALUE, Uid.OFFSET_OUTPUT]
    forward = lengths + offsets + ([Uid.OFFSET_LSE] if specs[0].lse else [])
    gradients = [uid for uid in sorted(operands) if uid > Uid.GRAD_OUTPUT]

    def addresses(uids: list[Uid]) -> list[int]:
        return [operands[uid].data_ptr() for uid in uids]

    return Told(
        addresses(forward),
        addresses([*lengths, *offsets, Uid.OFFSET_LSE]),
        addresses(gradients),
        way is Way.BY_TOKEN,
        spec if spec.backward else None,
        operands,
    )


def _head_offsets(layout: TensorSpec, heads: int, device: torch.device) -> Tensor:
    """Where each head of each batch entry starts; query heads of a group share theirs."""
    batch, own = layout.shape[:2]
    by_batch = torch.arange(batch, device=device)[:, None] * layout.stride[0]
    by_head = torch.arange(heads, device=device) // (heads // own) * layout.stride[1]
    starts = (by_batch + by_head).flatten()
    return torch.cat([starts, starts[-1:]])


class Met:
    """Which lengths of otherwise equal calls were met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lengths: collections.defaultdict[AttentionSpec, set[tuple[int, int]]]
        self._lengths = collections.defaultdict(set)

    def few(self, spec: AttentionSpec, way: Way) -> bool:
        """Notes the lengths of ``spec``; whether they are still among the first few."""
        family = shared(_shortest(spec), way)
        lengths = spec.seq_q, spec.seq_kv
        with self._lock:
            met = self._lengths[family]
            if len(met) < FEW:
                met.add(lengths)
            return lengths in met

    def clear(self) -> None:
        """Forgets them all."""
        with self._lock:
            self._lengths.clear()


def _shortest(spec: AttentionSpec) -> AttentionSpec:
    """A call that differs from ``spec`` in its lengths alone."""
    changed: dict[str, Any] = {}
    for name in OFFSETS.values():
        layout = getattr(spec, name)
        if layout is not None:
            batch, heads, seq, dim = layout.shape
            changed[name] = layout._replace(shape=(batch, heads, min(seq, 2), dim))
    return dataclasses.replace(spec, **changed)


met = Met()


def wanted(specs: list[AttentionSpec], device: Device, known: Callable[[], bool]) -> Way | None:
    """The way in which a call should share plans, None where it gets its own.

    Args:
        specs: of its forward, and of its backward if there is one.
        device: the GPU.
        known: whether its own plans are there already.
    """
    mode = config.settings().lengths
    if mode == "exact":
        return None
    found = way(specs, device)
    if found is None or mode == "bucketed":
        return found
    return None if met.few(specs[0], found) or known() else found
