"""What stands in for a GPU: it runs the graph of a spec on bare addresses, on the CPU.

It reads and writes what the graph's operands say and nothing else, so a wrong offset, length or
stride shows in the values. Rows that a kernel may leave as they were are left, and rows that it
may fill with anything are filled with `GARBAGE`.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import attention, devices, dispatch, reference
from cudnn_mha.cache import Slot
from cudnn_mha.checks import Reason
from cudnn_mha.devices import Device
from cudnn_mha.dispatch import Decisions
from cudnn_mha.expressions import Expression
from cudnn_mha.graph_builder import Uid, constants, lse_layout, operands
from cudnn_mha.spec import AttentionSpec, TensorSpec
from cudnn_mha.terms import paper_slopes

GARBAGE = 77.0


class Machine:
    """A GPU that is not there.

    Attributes:
        device: what it is.
        specs: of the plans that were asked for, in order.
        runs: of the plans that ran, in order.
    """

    def __init__(self, profile: str) -> None:
        self.device = dataclasses.replace(devices.described(profile), index=0)
        self.specs: list[AttentionSpec] = []
        self.runs: list[AttentionSpec] = []

    def find_plan(
        self, spec: AttentionSpec, device: Device, workspace_limit: int | None
    ) -> tuple[Slot, tuple[Reason, ...]]:
        assert device == self.device
        self.specs.append(spec)
        takes = tuple(Uid(uid) for uid in operands(spec) if uid not in constants(spec))
        plan: Any = SimpleNamespace(spec=spec, takes=takes)
        return Slot(plan), ()

    def run(self, plan: Any, addresses: list[int]) -> None:
        self.runs.append(plan.spec)
        interpret(plan.spec, dict(zip(plan.takes, addresses, strict=True)))


def install(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, profile: str = "h200", cudnn: int = 92400
) -> Machine:
    """Has the modules take CPU tensors for those of such a GPU."""
    machine = Machine(profile)
    without_streams(monkeypatch)
    monkeypatch.setattr(dispatch, "plain", lambda *tensors: True)
    monkeypatch.setattr(dispatch, "library_version", lambda: (cudnn, []))
    monkeypatch.setattr(dispatch, "find_plan", machine.find_plan)
    monkeypatch.setattr(attention, "run", machine.run)
    for module in modules:
        name = "_describe" if hasattr(module, "_describe") else "describe"
        describe = getattr(module, name)

        def described(*given: Any, describe: Callable[..., Any] = describe, **options: Any) -> Any:
            return describe(*given, device=machine.device, **options)

        monkeypatch.setattr(module, name, described)
        monkeypatch.setattr(module, "_routes", Decisions())
    return machine


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs on streams, and nothing is captured."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def at(address: int, layout: TensorSpec) -> Tensor:
    """The tensor of that layout that lies at an address."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if 0 in layout.shape:
        return torch.empty(layout.shape, dtype=dtype)
    memory = (ctypes.c_char * (layout.extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(layout.shape, layout.stride)


def _numbers(address: int, count: int, dtype: str) -> list[int]:
    return [int(n) for n in at(address, TensorSpec((count,), (1,), dtype)).tolist()]


def _lengths(spec: AttentionSpec, memory: dict[Uid, int]) -> tuple[list[int], list[int]]:
    """The lengths that a graph is told, the full ones where it is not."""
    batch = spec.batch
    if not spec.lengths:
        return [spec.seq_q] * batch, [spec.seq_kv] * batch
    sides = (Uid.SEQ_LEN_Q, Uid.SEQ_LEN_KV)
    found_q, found_kv = (_numbers(memory[uid], batch, "int32") for uid in sides)
    return found_q, found_kv


def evaluated(expression: Expression, known: dict[str, Tensor]) -> Tensor:
    """An expression on scores, indices and, in a derivative, the gradient."""
    if isinstance(expression, str):
        return known[expression]
    if isinstance(expression, float):
        return torch.tensor(expression, dtype=known["score"].dtype)
    name, *operands = expression
    operation = getattr(torch, {"max": "maximum", "min": "minimum"}.get(name, name))
    result: Tensor = operation(*(evaluated(operand, known) for operand in operands))
    return result


def computed(expression: Expression) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function on tensors that an expression stands for."""
    return lambda s, q, kv: evaluated(expression, {"score": s, "q_index": q, "kv_index": kv})


def interpret(spec: AttentionSpec, memory: dict[Uid, int]) -> None:
    """What a plan without dropout does to the operands at these addresses."""
    lengths_q, lengths_kv = _lengths(spec, memory)
    slopes = sinks = None
    by_head = TensorSpec((spec.heads_q,), (1,), "float32")
    if spec.alibi:
        slopes = torch.tensor(paper_slopes(spec.heads_q))
    if spec.slopes:
        slopes = at(memory[Uid.SLOPES], by_head)
    if Uid.SINKS in memory:
        sinks = at(memory[Uid.SINKS], by_head)
    if spec.grad_sinks:
        at(memory[Uid.GRAD_SINKS], by_head).zero_()
    for b, (length_q, length_kv) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        assert 0 <= length_q <= spec.seq_q and 0 <= length_kv <= spec.seq_kv
        if length_q == 0 or length_kv == 0:
            continue
        _Sequence(spec, memory, b, length_q, length_kv, slopes, sinks).run()


@dataclasses.dataclass
class _Sequence:
    """One sequence of a batch."""

    spec: AttentionSpec
    memory: dict[Uid, int]
    index: int
    length_q: int
    length_kv: int
    slopes: Tensor | None
    sinks: Tensor | None

    def rows(self, uid: Uid, layout: TensorSpec, length: int) -> Tensor:
        """``(1, H, length, D)`` of the sequence."""
        _, heads, seq, dim = layout.shape
        assert length <= seq
        start = self.index * layout.stride[0] if layout.shape[0] > 1 else 0
        if self.spec.ragged:
            offset = Uid[f"OFFSET_{uid.name}"]
            start = _numbers(self.memory[offset], self.spec.batch + 1, "int64")[self.index]
        item = torch.empty(0, dtype=getattr(torch, layout.dtype)).element_size()
        own = TensorSpec((1, heads, length, dim), layout.stride, layout.dtype)
        return at(self.memory[uid] + start * item, own)

    def pages(self, uid: Uid, layout: TensorSpec) -> Tensor:
        """``(1, H, length, D)`` of keys or values in pages."""
        assert self.spec.page_table is not None
        table = Uid.PAGE_TABLE_KEY if uid is Uid.KEY else Uid.PAGE_TABLE_VALUE
        columns = self.spec.page_table.shape[2]
        numbers = _numbers(self.memory[table], self.spec.batch * columns, "int32")
        own = numbers[self.index * columns : (self.index + 1) * columns]
        assert all(0 <= n < layout.shape[0] for n in own)
        pool = at(self.memory[uid], layout)
        return pool[own].transpose(0, 1).flatten(1, 2)[None, :, : self.length_kv]

    def side_kv(self, uid: Uid, layout: TensorSpec) -> Tensor:
        if self.spec.page_table is not None:
            return self.pages(uid, layout)
        whole = not self.spec.ragged and self.spec.seq_q > 1
        if whole:  # such kernels multiply what lies behind the last key by 0
            assert self.rows(uid, layout, layout.shape[2]).isfinite().all()
        return self.rows(uid, layout, self.length_kv)

    def bias(self, uid: Uid, layout: TensorSpec | None) -> Tensor | None:
        if layout is None:
            return None
        whole = at(self.memory[uid], layout)
        own = whole[self.index if layout.shape[0] > 1 else 0][None]
        return own[:, :, : self.length_q, : self.length_kv]

    def run(self) -> None:
        spec = self.spec
        options: dict[str, Any] = {
            "is_causal": spec.causal,
            "scale": spec.scale,
            "bottom_right": spec.bottom_right,
            "window": (
                -1 if spec.left is None else spec.left,
                -1 if spec.right is None else spec.right,
            ),
            "softcap": spec.softcap or None,
            "score_mod": None if spec.score_mod is None else computed(spec.score_mod),
            "alibi_slopes": self.slopes,
            "sinks": self.sinks,
        }
        query = self.rows(Uid.QUERY, spec.query, self.length_q)
        key = self.side_kv(Uid.KEY, spec.key)
        value = self.side_kv(Uid.VALUE, spec.value)
        output = self.rows(Uid.OUTPUT, spec.output, self.length_q)
        bias = self.bias(Uid.BIAS, spec.bias)
        if not spec.backward:
            result, sums = reference.attention(query, key, value, bias, **options)
            if not spec.ragged:
                self.rows(Uid.OUTPUT, spec.output, spec.seq_q).fill_(GARBAGE)
            output.copy_(result)
            if spec.lse:
                if not spec.ragged:
                    self.rows(Uid.LSE, lse_layout(spec), spec.seq_q).fill_(GARBAGE)
                self.rows(Uid.LSE, lse_layout(spec), self.length_q).copy_(sums[..., None])
            return
        assert spec.grad_output and spec.grad_query and spec.grad_key and spec.grad_value
        lse = self.rows(Uid.LSE, lse_layout(spec), self.length_q).squeeze(-1)
        upstream = self.rows(Uid.GRAD_OUTPUT, spec.grad_output, self.length_q)
        found = reference.gradients(upstream, query, key, value, output, lse, bias, **options)
        if not spec.ragged:
            for uid, layout in (
                (Uid.GRAD_QUERY, spec.grad_query),
                (Uid.GRAD_KEY, spec.grad_key),
                (Uid.GRAD_VALUE, spec.grad_value),
            ):
                self.rows(uid, layout, layout.shape[2]).fill_(GARBAGE)
        self.rows(Uid.GRAD_QUERY, spec.grad_query, self.length_q).copy_(found[0])
        self.rows(Uid.GRAD_KEY, spec.grad_key, self.length_kv).copy_(found[1])
        self.rows(Uid.GRAD_VALUE, spec.grad_value, self.length_kv).copy_(found[2])
        grad_bias = self.bias(Uid.GRAD_BIAS, spec.grad_bias)
        if grad_bias is not None:
            grad_bias += found[3].sum_to_size(grad_bias.shape)
        if spec.grad_sinks:
            by_head = TensorSpec((spec.heads_q,), (1,), "float32")
            at(self.memory[Uid.GRAD_SINKS], by_head).add_(found[4])
