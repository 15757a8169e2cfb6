"""Who computes a call that `F.scaled_dot_product_attention` cannot say, and by which plans.

What padded, packed and paged calls have in common until they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_mha import (
    checks,
    devices,
    dispatch,
    runtime,
)
from cudnn_mha.cache import Slot
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.devices import Device
from cudnn_mha.errors import CudnnSdpaUnsupportedError
from cudnn_mha.inputs import (
    Options,
    Outline,
    outline,
    require_local,
)
from cudnn_mha.sequences import Operands
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.terms import Terms, paper_slopes


class Given(NamedTuple):
    """The caller's tensors.

    Attributes:
        query: ``(B, Hq, Sq, Dqk)`` or ``(Hq, Sq, Dqk)``; packed, ``(tokens, Hq, Dqk)``.
        key: likewise with Hk and Skv.
        value: likewise with Hv, Skv and Dv.
        mask: as for `cudnn_sdpa`.
        lengths_q, lengths_kv: ``(B,)`` whole numbers, the real lengths.
        slopes: ``(Hq,)`` of ALiBi, instead of the paper's.
        sinks: ``(Hq,)`` logits without a key.
        starts_q, starts_kv: ``(B + 1,)`` tokens at which packed sequences start and end.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    starts_q: Tensor | None = None
    starts_kv: Tensor | None = None

    @property
    def has_lengths(self) -> bool:
        return self.lengths_q is not None or self.lengths_kv is not None


Result = tuple[Tensor, Tensor | None]
"""Output, and log-sum-exp where it is asked for."""


class Manner(Enum):
    """How a graph is told the lengths of its sequences."""

    FULL = "full"  # all sequences are as long as the tensors
    RAGGED = "ragged"  # by offsets and lengths; nothing beyond a sequence is touched
    CACHE = "cache"  # by lengths, one query: the kernels for that leave the rest of keys alone
    CLEANED = "cleaned"  # by lengths; the kernel multiplies padding by 0, so it is made finite


@dataclass(eq=False)
class Route:
    """How one signature is computed: by which plans, or by PyTorch for what reasons.

    Attributes:
        options: the call's arguments that are not tensors.
        terms: what else it asks for.
        outline: what the caller gets back.
        reasons: why cuDNN does not serve the call; empty where it does.
        device: the GPU, if there is one.
        manner: how lengths are told.
        spec: the tensors as they lie in memory.
        graphs: what cuDNN is asked for: the forward, and the backward where a gradient is wanted;
            empty where the call is none that a spec can be made of.
        forward, backward: the plans; no backward where no gradient is wanted.
        packed: the tensors are ``(tokens, H, D)``.
        operands: tensors that are the same for every call of the signature.
        told: the spec of the graph for tensors as they lie in memory.
        wide: the route whose backward takes a gradient of the log-sum-exp, once one was wanted.
        sinks_after: the sinks are applied to what plans give, which know none.
    """

    options: Options
    terms: Terms
    outline: Outline
    reasons: tuple[Reason, ...] = ()
    device: Device | None = None
    manner: Manner = Manner.FULL
    spec: AttentionSpec | None = None
    graphs: tuple[AttentionSpec, ...] = ()
    forward: Slot | None = None
    backward: Slot | None = None
    packed: bool = False
    operands: Operands = field(default_factory=dict)
    told: Callable[[AttentionSpec], AttentionSpec] | None = None
    wide: Route | None = None
    sinks_after: bool = False


def require_operands(given: Given) -> None:
    """Raises TypeError for what is no tensor, and for one that is spread over ranks."""
    names = {"seq_lens_q": given.lengths_q, "seq_lens_kv": given.lengths_kv}
    names |= {"alibi_slopes": given.slopes, "sinks": given.sinks}
    names |= {"cu_seqlens_q": given.starts_q, "cu_seqlens_kv": given.starts_kv}
    for name, tensor in names.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
    require_local(given)


def validate_operands(given: Given, batch: int, heads: int) -> None:
    """Raises for operands that do not fit so many sequences and heads of the query."""
    query = given.query
    lengths = {"seq_lens_q": given.lengths_q, "seq_lens_kv": given.lengths_kv}
    for name, tensor in lengths.items():
        if tensor is not None:
            require_fit(name, tensor, (batch,), query, whole=True)
    for name, tensor in {"alibi_slopes": given.slopes, "sinks": given.sinks}.items():
        if tensor is not None:
            require_fit(name, tensor, (heads,), query, whole=False)
    if given.slopes is not None and given.slopes.requires_grad:
        raise ValueError("alibi_slopes has no gradient; detach it")


def require_fit(
    name: str, tensor: Tensor, shape: tuple[int, ...], query: Tensor, *, whole: bool
) -> None:
    """Raises for an operand of another shape, device or dtype than the query asks for."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != query.device:
        raise RuntimeError(
            f"{name} must be on the device of query, {query.device}, got {tensor.device}"
        )
    fine = tensor.dtype in (torch.int32, torch.int64) if whole else tensor.is_floating_point()
    if not fine:
        allowed = "int32 or int64" if whole else "of a floating-point dtype"
        raise TypeError(f"{name} must be {allowed}, got {tensor.dtype}; convert it")


def decided(
    routes: dispatch.Decisions[Route],
    signature: tuple[Any, ...],
    describe: Callable[[], Route],
    constant_operands: Callable[[Route], Operands],
) -> Route:
    """The route of a call's signature, with its plans; decided where the signature is a new one.

    Args:
        routes: those that are decided.
        signature: all that decides.
        describe: the route, without its plans.
        constant_operands: what its plans are told that no call of the signature changes.
    """
    route = routes.get(signature)
    if route is not None:
        return route
    route = describe()
    find_plans(route)
    if not route.reasons:
        route.operands = runtime.outside_pools(lambda: constant_operands(route))
    routes.keep(signature, route)
    return route


def follow(route: Route, run: Callable[[], Result], fall_back: Callable[..., Result]) -> Result:
    """A call's result by its route.

    Args:
        route: that of the call.
        run: the result by cuDNN.
        fall_back: the result by PyTorch, given the reasons.
    """
    if route.reasons:
        return fall_back(*route.reasons)
    try:
        return run()
    except torch.OutOfMemoryError as error:
        message = f"not enough memory for cuDNN: {error}"
        return fall_back(Reason("memory", message, Kind.UNAVAILABLE))


def begin(
    given: Given,
    options: Options,
    terms: Terms,
    device: Device | None,
    *,
    chosen: bool = False,
) -> tuple[Route, list[Reason], Device | None]:
    """A route without its spec, the reasons against it so far, and the GPU.

    None for the GPU where no spec can be made of the call; the reasons are the route's then.
    ``chosen`` says that PyTorch's switches for its backends do not matter.
    """
    route = Route(options, terms, outline(given.query, given.value, options))
    if device is None and given.query.is_cuda:
        device = devices.cuda(given.query.device.index)
    route.device = device
    reasons = dispatch.first_reasons(*given[:3], device, chosen=chosen)
    if not dispatch.describable(given.query, reasons):
        route.reasons = tuple(reasons)
        return route, reasons, None
    return route, reasons, device


def with_sinks(route: Route, spec: AttentionSpec, given: Given, gradient: bool) -> AttentionSpec:
    """The forward spec with the call's sinks, or the route told to apply them afterwards.

    The kernels for one query, the only fast ones for it, know no sinks.
    """
    if given.sinks is None:
        return spec
    route.sinks_after = spec.seq_q == 1 and not gradient
    if route.sinks_after:
        return dataclasses.replace(spec, lse=True)
    return dataclasses.replace(spec, sinks=True)


def settle(
    route: Route,
    wanted: list[AttentionSpec],
    told: Callable[[AttentionSpec], AttentionSpec],
    reasons: list[Reason],
) -> None:
    """Sets a route's graphs, and every reason against them that shows without cuDNN.

    Args:
        route: which.
        wanted: the forward, and the backward where there is one, of tensors as they lie in memory.
        told: gives the spec of the graph for one of these.
        reasons: what speaks against the call already.
    """
    assert route.device is not None
    version, unavailable = dispatch.library_version()
    route.spec, route.told = wanted[-1], told
    route.graphs = tuple(map(told, wanted))
    found = [
        reason for spec in route.graphs for reason in checks.check(spec, route.device, version)
    ]
    route.reasons = dispatch.distinct([*reasons, *unavailable, *found])


def find_plans(route: Route) -> None:
    """Finds the plans of a route that nothing speaks against, or cuDNN's reasons."""
    if route.reasons:
        return
    assert route.device is not None
    if not route.device.described and torch.cuda.is_current_stream_capturing():
        # Plans may be there, but what they are told is not, and writing it synchronizes.
        route.reasons = (dispatch.not_while_captured(),)
        return
    slots, route.reasons = dispatch.find_plans(
        route.graphs, route.device, route.options.workspace_limit
    )
    if not route.reasons:
        route.forward = slots[0]
        route.backward = slots[1] if len(slots) > 1 else None


def slopes_of(given: Given, terms: Terms) -> Tensor | None:
    """The slopes ``(Hq,)`` that a fallback takes: the caller's, else the paper's, if any."""
    if given.slopes is not None or not terms.alibi:
        return given.slopes
    heads = given.query.shape[1]  # of a padded batch and of a packed one alike
    return torch.tensor(paper_slopes(heads), device=given.query.device)


def accept(given: Given, options: Options, reasons: tuple[Reason, ...]) -> None:
    """Raises where no fallback is allowed, else says why there is one."""
    name = " ".join(
        f"{name}={tuple(t.shape)}:{t.dtype}"
        for name, t in zip(Given._fields, given, strict=True)
        if t is not None
    )
    if not options.fallback:
        raise CudnnSdpaUnsupportedError(name, reasons)
    if given.query.is_cuda:
        dispatch.log_fallback(name, reasons)
