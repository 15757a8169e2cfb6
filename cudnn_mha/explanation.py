"""`explain`: what would compute a call, and why, without computing it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import attention, checks, devices, padded
from cudnn_mha.cache import Slot
from cudnn_mha.checks import MAX_ELEMENTS, Kind, Reason
from cudnn_mha.devices import Device
from cudnn_mha.dispatch import (
    SPLITTABLE,
    Decision,
    check_and_find,
    decide,
    needs_reference,
    not_on_cuda,
)
from cudnn_mha.execution import widened_graph
from cudnn_mha.inputs import (
    Options,
    make_options,
    require_countable,
    split,
    validate,
    without_data,
)
from cudnn_mha.routes import Given, Manner, Route, find_plans
from cudnn_mha.score_mod import ScoreMod, trace
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.terms import asks_more, make_terms

REFERENCE = "cudnn_mha.reference, plain PyTorch"

TOLD = {
    Manner.RAGGED: "ragged: by offsets and lengths; kernels touch nothing beyond a sequence",
    Manner.CACHE: "cache: by lengths; kernels leave keys beyond a sequence alone",
    Manner.CLEANED: "cleaned: by lengths; query, key and value are copied with zeros as padding",
}
"""How graphs are told lengths, in words."""


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
        lengths: how the graphs are told the lengths of sequences; None where the call has none.
        lse_gradient: every reason why cuDNN has no gradient of the log-sum-exp, so that asking for
            it raises; empty where it has one, None where the call leaves nothing to ask for.
    """

    served: bool
    device: str
    reasons: tuple[Reason, ...]
    graphs: tuple[Graph, ...]
    runs: str
    lengths: str | None = None
    lse_gradient: tuple[Reason, ...] | None = None

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
        if self.lengths is not None:
            lines.append(f"  lengths: {self.lengths}")
        if self.lse_gradient is not None:
            listed = "; ".join(map(str, self.lse_gradient)) or "served by cuDNN"
            lines.append(f"  gradient of the log-sum-exp: {listed}")
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
    seq_lens_q: Tensor | bool | None = None,
    seq_lens_kv: Tensor | bool | None = None,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | bool | None = None,
    softcap: float | None = None,
    sinks: Tensor | bool | None = None,
    score_mod: ScoreMod | None = None,
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
        seq_lens_q, seq_lens_kv, alibi_slopes, sinks: a tensor, whose values are not read, or True
            where the call has one. Sinks that are only said to be there are parameters: their
            gradient is wanted where gradients are.
        causal_alignment, window, alibi, softcap, score_mod: as for `cudnn_sdpa`.
        dtype: dtype of query, key and value given as shapes.
        mask_dtype: dtype of an attn_mask given as a shape.
        requires_grad: whether gradients are wanted; None asks the tensors.
        gpu: name of a described GPU, such as ``'b200'``; None takes the tensors' own device, or
            the current one for shapes and ``meta`` tensors.

    Raises:
        ValueError, TypeError, RuntimeError: as for `cudnn_sdpa`, and for an unknown ``gpu``.
    """
    options = make_options(
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        deterministic,
        workspace_limit,
        True,
    )
    operands = given_operands(
        seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv, alibi_slopes=alibi_slopes, sinks=sinks
    )
    terms = make_terms(is_causal, causal_alignment, window, softcap, alibi, trace(score_mod))
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    asked = Asked(given, operands, dtype, requires_grad, gpu)
    with torch.enable_grad():
        q, k, v = (asked.meta(name) for name in ("query", "key", "value"))
        mask = None if attn_mask is None else asked.meta("attn_mask", mask_dtype)
        validate(q, k, v, mask, options)
        require_countable(q, k, v, mask, options)
        made = (q, k, v, mask)
        modified = score_mod is not None
        if not asks_more(causal_alignment, window, softcap, alibi, modified, *operands):
            return _explain_ordinary(asked, made, options)
        terms = dataclasses.replace(terms, alibi=alibi or "alibi_slopes" in operands)
        call = asked.call(*made)
        padded.validate_given(call)
        route = padded.describe(call, options, terms, asked.gradient, asked.device)
        told = TOLD.get(route.manner) if call.has_lengths else None
        return asked.explained(route, made, told)


def _explain_ordinary(
    asked: Asked, made: tuple[Tensor, Tensor, Tensor, Tensor | None], options: Options
) -> Explanation:
    """The verdict on a call that PyTorch's own function could be told."""
    device, gradient = asked.device, asked.gradient
    decision = decide(*made, options, gradient=gradient, device=device)
    part, parts = made, 1
    while SPLITTABLE.issuperset(r.rule for r in decision.reasons) and decision.reasons:
        cut = split(*part)
        if cut is None:
            break
        part = cut.halves[1]  # the larger one where they differ
        parts *= 2
        decision = decide(*part, options, gradient=gradient, device=device)
    slots = [decision.forward, *decision.backward.values()] if decision.served else []
    served_by = "cuDNN" + (f", in {parts} parts" if parts > 1 else "")
    otherwise = "torch.nn.functional.scaled_dot_product_attention, without cuDNN"
    if needs_reference(*part, options, gradient=gradient):
        otherwise = REFERENCE
    found = asked.verdict(
        made, decision.reasons, _specs(decision), slots, options, served_by, otherwise
    )
    return asked.with_lse_gradient(found, options, lambda: attention.widened(decision)[1])


def given_operands(**operands: Tensor | bool | None) -> dict[str, Tensor | bool]:
    """Those that a call has.

    Raises:
        TypeError: one is neither a tensor nor True, False or None.
    """
    found: dict[str, Tensor | bool] = {}
    for name, given in operands.items():
        if given is not None and not isinstance(given, Tensor | bool):
            raise TypeError(
                f"{name} must be a torch.Tensor, True where there is one, or None, got {given!r}"
            )
        if given is not None and given is not False:
            found[name] = given
    return found


class Asked:
    """What is explained, and for which GPU.

    Args:
        given: tensors and shapes by the names of the arguments.
        operands: what else the call has, each a tensor or True.
        dtype: dtype of what is given as a shape.
        requires_grad: whether gradients are wanted; None asks the tensors.
        gpu: name of a described GPU; None takes the tensors' own device, or the current one.

    Attributes:
        device: the GPU; None where there is none.
        gradient: whether gradients are wanted.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        operands: Mapping[str, Tensor | bool],
        dtype: torch.dtype,
        requires_grad: bool | None,
        gpu: str | None,
    ) -> None:
        self._given, self._operands, self._dtype = given, operands, dtype
        tensors = [t for t in given.values() if isinstance(t, Tensor)]
        self._tensors = tensors
        if requires_grad is None:
            every = (*tensors, *(t for t in operands.values() if isinstance(t, Tensor)))
            requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in every)
        self.gradient = requires_grad
        self.device: Device | None = None
        if gpu is not None:
            self.device = devices.described(gpu)
        elif tensors and tensors[0].is_cuda:
            self.device = devices.cuda(tensors[0].device.index)
        elif all(t.is_meta for t in tensors) and torch.cuda.is_available():
            self.device = devices.cuda(torch.cuda.current_device())

    def meta(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """That tensor without data."""
        return _meta(name, self._given[name], dtype or self._dtype)

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        starts: Sequence[Tensor] = (),
    ) -> Given:
        """The call with these tensors and the operands, all without data.

        Args:
            query, key, value, mask: as in `Given`.
            starts: of queries and of keys, where sequences are packed.
        """
        packed = bool(starts)
        heads = tuple(query.shape[1:2] if packed else query.shape[-3:-2])
        batch = starts[0].numel() - 1 if packed else padded.batch_of(query, key, value)
        return Given(
            query,
            key,
            value,
            mask,
            self._operand("seq_lens_q", (batch,), torch.int32),
            self._operand("seq_lens_kv", (batch,), torch.int32),
            self._operand("alibi_slopes", heads, torch.float32),
            self._operand("sinks", heads, torch.float32),
            *starts,
        )

    def _operand(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """That operand; of this shape and dtype where it is only said to be there."""
        given = self._operands.get(name)
        if given is None:
            return None
        if isinstance(given, Tensor):
            return _meta(name, given, dtype)
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        return tensor.requires_grad_(name == "sinks" and self.gradient)

    def explained(
        self,
        route: Route,
        made: Iterable[Tensor | None],
        told: str | None,
        served_by: str = "cuDNN",
    ) -> Explanation:
        """The verdict on a call that was described, whose plans are found now.

        Args:
            route: what became of it.
            made: the tensors without data.
            told: how its graphs are told lengths, in words.
            served_by: who computes it where cuDNN serves it.
        """
        find_plans(route)
        slots = [] if route.reasons else [route.forward, route.backward]
        found = self.verdict(
            made, route.reasons, route.graphs, slots, route.options, served_by, REFERENCE
        )
        found = dataclasses.replace(found, lengths=told if route.graphs else None)
        return self.with_lse_gradient(found, route.options, lambda: widened_graph(route)[1])

    def with_lse_gradient(
        self, found: Explanation, options: Options, graph: Callable[[], AttentionSpec]
    ) -> Explanation:
        """The verdict, and whether the log-sum-exp has a gradient, whose backward is ``graph``."""
        if not (found.served and options.return_lse and self.gradient):
            return found
        assert self.device is not None
        _, reasons = check_and_find(graph(), self.device, options.workspace_limit)
        return dataclasses.replace(found, lse_gradient=reasons)

    def verdict(
        self,
        made: Iterable[Tensor | None],
        reasons: tuple[Reason, ...],
        specs: Iterable[AttentionSpec],
        slots: Iterable[Slot | None],
        options: Options,
        served_by: str,
        otherwise: str,
    ) -> Explanation:
        """The verdict on a decided call.

        Args:
            made: the tensors without data.
            reasons: why cuDNN does not serve it.
            specs: its graphs; those of the plans where it is served.
            slots: its plans.
            options: its other arguments.
            served_by: who computes it where cuDNN serves it.
            otherwise: who does where not.
        """
        device, tensors = self.device, self._tensors
        too_large = _too_large(self._given, made, device)
        reasons = (*reasons, *too_large)
        plans = [slot.plan for slot in slots if slot is not None and slot.plan is not None]
        if plans:
            specs = [plan.spec for plan in plans]
        shown = [] if too_large else plans
        graphs = []
        for spec, plan in itertools.zip_longest(specs, shown):
            assert device is not None
            engine, workspace = (plan.engine, plan.workspace) if plan else (None, None)
            graphs.append(Graph(str(spec), engine, workspace, _remedies(spec, device, options)))
        where = str(device) if device else "these tensors"
        if device is None and tensors and not tensors[0].is_meta:
            elsewhere = not_on_cuda(tensors[0])  # what was decided on has no device of its own
            reasons = tuple(elsewhere if r.rule == "device" else r for r in reasons)
        runs = otherwise if reasons else served_by
        if too_large:
            runs = "nothing, since the tensors do not fit into the GPU's memory"
        return Explanation(not reasons, where, reasons, tuple(graphs), runs)


def _meta(name: str, given: Any, dtype: torch.dtype) -> Tensor:
    """The same tensor without data."""
    if isinstance(given, Tensor):
        return without_data(given).requires_grad_(given.requires_grad)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"the dtype of {name} must be a torch.dtype, such as torch.bfloat16, got {dtype!r}"
        )
    return torch.empty(_shape(name, given), dtype=dtype, device="meta")


def _shape(name: str, given: Any) -> tuple[int, ...]:
    """The numbers of a shape.

    Raises:
        TypeError: it is no shape; a text is none either, whatever it says.
        ValueError: a number is negative, or no GPU holds so many elements.
    """
    try:
        if isinstance(given, str | bytes | bytearray):
            raise TypeError
        shape = tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(
            f"{name} must be a torch.Tensor or a shape of whole numbers such as "
            f"(4, 32, 4096, 128), got {given!r}; give a tensor or a tuple of int"
        ) from None
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} must have no negative size, got {shape}; give sizes of 1 or more")
    if math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(
            f"{name} must have at most 2^48 elements, more than any GPU's memory holds, got "
            f"{shape}; make it smaller"
        )
    return shape


def _too_large(
    given: Mapping[str, object], made: Iterable[Tensor | None], device: Device | None
) -> tuple[Reason, ...]:
    """The reason against a call that is only described, and larger than the GPU."""
    if device is None or any(isinstance(t, Tensor) and not t.is_meta for t in given.values()):
        return ()
    # A tensor that is given twice is there once.
    sizes = {
        id(own) if isinstance(own, Tensor) else name: tensor.untyped_storage().nbytes()
        for (name, own), tensor in zip(given.items(), made, strict=True)
        if tensor is not None
    }
    needed = sum(sizes.values())
    if needed <= device.memory:
        return ()
    message = (
        f"the tensors of the call take {needed / 2**30:,.0f} GiB, and {device.name} has "
        f"{device.memory / 2**30:,.0f} GiB; make the call smaller"
    )
    return (Reason("memory", message, Kind.UNAVAILABLE),)


def _specs(decision: Decision) -> list[AttentionSpec]:
    """What cuDNN would be asked for, were there plans."""
    if decision.spec is None or decision.device is None:
        return []
    specs = [checks.remedied(decision.spec, decision.device)]
    if decision.gradient:
        specs.append(decision.backward_spec(decision.spec.output))
    return specs


def _remedies(spec: AttentionSpec, device: Device, options: Options) -> tuple[str, ...]:
    """What is done about faults that the graph would meet."""
    bare = dataclasses.replace(spec, padding=False)  # as it was before any remedy
    remedies = tuple(
        f"{hazard.remedy} ({hazard.condition}; costs {hazard.cost})"
        for hazard in checks.HAZARDS
        if hazard.applies and hazard.applies(bare, device)
    )
    scale = options.scale
    if scale is not None and scale <= 0:  # the spec has what is left of it
        hazard = next(h for h in checks.HAZARDS if h.name == "scale_not_positive")
        sign = -1 if scale < 0 else 0
        remedies += (
            f"scale is {scale:g}: the query is multiplied by its sign, {sign}, and the graph "
            f"takes scale {spec.scale:g} ({hazard.condition}; costs {hazard.cost})",
        )
    return remedies
