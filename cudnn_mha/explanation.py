"""`explain`: what would compute a call, and why, without computing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import checks, config, devices
from cudnn_mha.checks import Reason
from cudnn_mha.dispatch import (
    SPLITTABLE,
    Decision,
    decide,
    find_plan,
    needs_reference,
    not_on_cuda,
)
from cudnn_mha.inputs import Options, require_kinds, split, validate, without_data
from cudnn_mha.spec import AttentionSpec


@dataclass(frozen=True)
class Graph:
    """One graph of the call.

    Attributes:
        spec: the graph in words.
        engine: cuDNN's name of the engine that would run it, or None.
        workspace: bytes of scratch device memory, or None.
        remedies: what is done about faults of cuDNN's kernels that the call would meet.
    """

    spec: str
    engine: str | None
    workspace: int | None
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The verdict on one call.

    Attributes:
        served: whether cuDNN computes it.
        device: the GPU it was decided for.
        reasons: every reason why not; empty where served.
        graphs: forward, then backward where a gradient is wanted; of one part, where the call is
            computed in parts.
        runs: who would compute it.
    """

    served: bool
    device: str
    reasons: tuple[Reason, ...]
    graphs: tuple[Graph, ...]
    runs: str

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{'served by cuDNN' if self.served else 'not served by cuDNN'} on {self.device}"]
        lines += [f"  reason: {reason}" for reason in self.reasons]
        for graph in self.graphs:
            lines.append(f"  {graph.spec}")
            if graph.engine is not None:
                lines.append(f"    engine {graph.engine}, workspace {graph.workspace} bytes")
            lines += [f"    remedy: {remedy}" for remedy in graph.remedies]
        lines.append(f"  runs: {self.runs}")
        return "\n".join(lines)


def explain(
    query: Tensor | Sequence[int],
    key: Tensor | Sequence[int],
    value: Tensor | Sequence[int],
    attn_mask: Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    deterministic: bool | None = None,
    workspace_limit: int | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    mask_dtype: torch.dtype = torch.bool,
    requires_grad: bool | None = None,
    gpu: str | None = None,
) -> Explanation:
    """What `cudnn_sdpa` would do with a call: the verdict, every reason, engines and workspace.

    Plans are compiled, as the call itself would; nothing is computed. With ``gpu`` this needs no
    GPU.

    Args:
        query: a tensor, whose values are not read (``meta`` will do), or a shape, taken as
            contiguous.
        key, value, attn_mask: likewise.
        dropout_p, is_causal, scale, enable_gqa: as for `cudnn_sdpa`.
        return_lse, deterministic, workspace_limit: as for `cudnn_sdpa`.
        dtype: dtype of query, key and value given as shapes.
        mask_dtype: dtype of an attn_mask given as a shape.
        requires_grad: whether gradients are wanted; None asks the tensors.
        gpu: name of a described GPU, such as ``'b200'``; None takes the tensors' own device, or
            the current one for shapes and ``meta`` tensors.

    Raises:
        ValueError, TypeError, RuntimeError: as for `cudnn_sdpa`, and for an unknown ``gpu``.
    """
    given = [query, key, value, attn_mask]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if workspace_limit is None:
        workspace_limit = config.settings().workspace_limit
    require_kinds(dropout_p, is_causal, scale, enable_gqa, return_lse, deterministic, True)
    options = Options(
        float(dropout_p),
        is_causal,
        None if scale is None else float(scale),
        enable_gqa,
        return_lse,
        deterministic,
        config.parse_bytes(workspace_limit),
    )
    tensors = [t for t in given if isinstance(t, Tensor)]
    if requires_grad is None:
        requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    device = None
    if gpu is not None:
        device = devices.described(gpu)
    elif tensors and tensors[0].is_cuda:
        device = devices.cuda(tensors[0].device.index)
    elif all(t.is_meta for t in tensors) and torch.cuda.is_available():
        device = devices.cuda(torch.cuda.current_device())
    dtypes = (dtype, dtype, dtype, mask_dtype)
    with torch.enable_grad():
        q, k, v, mask = (_meta(t, kind) for t, kind in zip(given, dtypes, strict=True))
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            if tensor is None:
                raise TypeError(f"{name} must be a torch.Tensor or a shape, got None")
        assert q is not None and k is not None and v is not None
        validate(q, k, v, mask, options)
        decision = decide(q, k, v, mask, options, gradient=requires_grad, device=device)
        parts = 1
        while SPLITTABLE.issuperset(r.rule for r in decision.reasons) and decision.reasons:
            cut = split(q, k, v, mask)
            if cut is None:
                break
            q, k, v, mask = cut.halves[1]  # the larger one where they differ
            parts *= 2
            decision = decide(q, k, v, mask, options, gradient=requires_grad, device=device)
    graphs = tuple(_graph(spec, decision) for spec in _specs(decision))
    where = str(device) if device else "these tensors"
    if device is None and tensors and not tensors[0].is_meta:
        elsewhere = not_on_cuda(tensors[0])  # what was decided on has no device of its own
        decision.reasons = tuple(elsewhere if r.rule == "device" else r for r in decision.reasons)
    served = decision.served
    if served:
        runs = "cuDNN" + (f", in {parts} parts" if parts > 1 else "")
    elif needs_reference(q, k, v, mask, options, gradient=requires_grad):
        runs = "cudnn_mha.reference, plain PyTorch"
    else:
        runs = "torch.nn.functional.scaled_dot_product_attention, without cuDNN"
    return Explanation(served, where, decision.reasons, graphs, runs)


def _meta(given: Tensor | Sequence[int] | None, dtype: torch.dtype) -> Tensor | None:
    """The same tensor without data."""
    if given is None:
        return None
    if isinstance(given, Tensor):
        return without_data(given).requires_grad_(given.requires_grad)
    return torch.empty(tuple(given), dtype=dtype, device="meta")


def _specs(decision: Decision) -> list[AttentionSpec]:
    if decision.spec is None or decision.device is None:
        return []
    specs = [checks.remedied(decision.spec, decision.device)]
    if decision.gradient:
        specs.append(decision.backward_spec(decision.spec.output))
    return specs


def _graph(spec: AttentionSpec, decision: Decision) -> Graph:
    assert decision.device is not None
    bare = dataclasses.replace(spec, padding=False)  # as it was before any remedy
    remedies = tuple(
        f"{hazard.remedy} ({hazard.condition}; costs {hazard.cost})"
        for hazard in checks.HAZARDS
        if hazard.applies and hazard.applies(bare, decision.device)
    )
    plan = None
    if decision.served:
        slot, _ = find_plan(spec, decision.device, decision.options.workspace_limit)
        plan = slot.plan if slot else None
    if plan is None:
        return Graph(str(spec), None, None, remedies)
    return Graph(str(spec), plan.engine, plan.workspace, remedies)
