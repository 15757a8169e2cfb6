"""Who computes a call: cuDNN by which plans, or PyTorch and for what reasons.

Deciding costs far more than the decision's use, so it is made once for each distinct signature
and kept in a `Decision`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import SDPBackend

from cudnn_mha import checks, config, devices, lengths, recording, reference, runtime
from cudnn_mha.cache import Slot, background, plan_key, plans
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.devices import Device
from cudnn_mha.errors import CudnnSdpaUnsupportedError, CudnnUnavailableError
from cudnn_mha.inputs import (
    DTYPES,
    Options,
    Outline,
    addressable,
    backward_spec,
    forward_spec,
    is_half,
    layout_of,
    outline,
    prepare,
    without_data,
    writable_output,
)
from cudnn_mha.lengths import Told
from cudnn_mha.plan import Plan
from cudnn_mha.spec import AttentionSpec, TensorSpec

logger = logging.getLogger("cudnn_mha")

TRANSIENT = {"capture", "compiling"}
"""Rules that may not hold the next time, so that a decision with them is not kept."""

NO_SPEC = {"device", "ndim", "empty"}
"""Rules of calls that no spec can be made of, so that there is nothing to look at any closer."""

ALONE = {"cudnn", "workspace_limit"}
"""Rules that may hold for a plan for many lengths, and not for one of the call's own."""

SPLITTABLE = {"launch_grid", "index_overflow"}
"""Rules that a call escapes when it is computed in parts."""


_PLAIN = {Tensor, Parameter}


@dataclass(eq=False)
class Decision:
    """How one signature is computed.

    Attributes:
        options: the call's arguments that are not tensors.
        outline: what the caller gets back.
        device: the GPU, or None for a call that is not cuDNN's at all.
        forward: the slot of the forward plan, where cuDNN serves the call.
        spec: the forward spec, where one could be made.
        backward: slots of the backward plans by the strides of the output's gradient; None where
            such a gradient has to be copied.
        bias_gradient: the mask's gradient is wanted.
        reasons: why cuDNN does not serve the call; empty where it does.
        as_is: the caller's tensors are what cuDNN reads.
        gradient: some gradient will be wanted.
        output_stride: strides of the output that cuDNN writes.
        like_query: that is what ``empty_like(query)`` has.
        like_lse: a tensor with the layout of the log-sum-exp, once one was made.
        like_inputs: the gradients of query, key and value are what ``empty_like`` of these gives.
        result_stride: strides of the output that an operator owes its caller.
        direct: an operator's output is what cuDNN writes.
        bare: served, and nothing but query, key and value goes in and the output comes out.
        bare_but_gradient: the caller's tensors go to autograd, and what comes back is the result.
        told: what plans for many lengths are told; None for plans of the call's own.
    """

    options: Options
    outline: Outline
    device: Device | None = None
    forward: Slot | None = None
    spec: AttentionSpec | None = None
    backward: dict[tuple[int, ...], Slot | None] = field(default_factory=dict)
    bias_gradient: bool = False
    reasons: tuple[Reason, ...] = ()
    as_is: bool = False
    gradient: bool = False
    output_stride: tuple[int, ...] = ()
    like_query: bool = False
    like_lse: Tensor | None = None
    like_inputs: bool = False
    result_stride: tuple[int, ...] = ()
    direct: bool = False
    bare: bool = False
    bare_but_gradient: bool = False
    told: Told | None = None

    @property
    def served(self) -> bool:
        return self.forward is not None

    def backward_plan(self, grad_output: Tensor) -> tuple[Plan, Tensor]:
        """The backward plan for an output's gradient, and that gradient as the plan reads it.

        A gradient in a layout of its own gets a plan of its own; one that cuDNN cannot address,
        such as the all-zero strides that ``sum().backward()`` gives, is copied.
        """
        stride = grad_output.stride()
        slot = None
        if grad_output.data_ptr() % checks.ALIGNMENT == 0:
            slot = self.backward.get(stride)
        if slot is not None:
            plans.touch(slot)
            return slot.plan, grad_output  # type: ignore[return-value]
        assert self.spec is not None and self.device is not None
        own = self.told is None and stride not in self.backward
        if own and addressable(grad_output):
            spec = self.backward_spec(layout_of(grad_output))
            slot, reasons = find_plan(spec, self.device, self.options.workspace_limit)
            if TRANSIENT.isdisjoint(reason.rule for reason in reasons):
                self.backward[stride] = slot
        if slot is None:
            layout = self.spec.output
            copy = grad_output.new_empty_strided(layout.shape, layout.stride)
            grad_output = copy.copy_(grad_output)
            slot = self.backward[layout.stride]
        assert slot is not None and slot.plan is not None
        plans.touch(slot)
        return slot.plan, grad_output

    def backward_spec(self, grad_output: TensorSpec) -> AttentionSpec:
        assert self.spec is not None and self.device is not None
        spec = backward_spec(
            self.spec,
            grad_output,
            bias_gradient=self.bias_gradient,
            deterministic=self.options.deterministic,
        )
        return checks.remedied(spec, self.device)


MAX_DECISIONS = 4096


class _Decided(Protocol):
    reasons: tuple[Reason, ...]


D = TypeVar("D", bound=_Decided)


class Decisions(dict[tuple[Any, ...], D]):
    """Decisions by signature; they go when plans are dropped, and when there are too many."""

    def __init__(self) -> None:
        super().__init__()
        plans.on_drop(self.clear)

    def keep(self, signature: tuple[Any, ...], decision: D) -> None:
        """Remembers a decision, unless it may be another the next time."""
        if TRANSIENT.isdisjoint(reason.rule for reason in decision.reasons):
            if len(self) >= MAX_DECISIONS:
                self.clear()
            self[signature] = decision


def decide(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Options,
    *,
    gradient: bool,
    bias_gradient: bool | None = None,
    device: Device | None = None,
    chosen: bool = False,
    output: Tensor | None = None,
) -> Decision:
    """How a valid call is computed.

    Args:
        query, key, value, mask: the caller's tensors; on ``meta`` with ``device`` given.
        options: the caller's other arguments.
        gradient: some gradient will be wanted.
        bias_gradient: that of the mask too; None asks the mask.
        device: the GPU to decide for; None takes that of the tensors.
        chosen: cuDNN was chosen already, so PyTorch's switches for its backends do not matter.
        output: a tensor with the layout that the output should have; None takes ours.
    """
    decision = Decision(options, outline(query, value, options), gradient=gradient)
    if device is None and query.is_cuda:
        device = devices.cuda(query.device.index)
    decision.device = device
    reasons = first_reasons(query, key, value, device, chosen=chosen)
    if not describable(query, reasons):
        decision.reasons = tuple(reasons)
        return decision
    assert device is not None
    if reasons:  # the spec is made for the sake of others: no tensor is copied for it
        query, key, value = (without_data(t) for t in (query, key, value))
        if mask is not None:
            mask = without_data(mask).requires_grad_(mask.requires_grad)
    inputs = prepare(query, key, value, mask, options)
    decision.as_is = inputs.are(query, key, value)
    if bias_gradient is None:
        bias_gradient = mask is not None and mask.requires_grad
    decision.bias_gradient = bias_gradient and gradient
    lse = gradient or options.return_lse
    wish = writable_output(query, value, output) if decision.as_is else None
    decision.spec = forward_spec(inputs, options, decision.outline.scale, lse=lse, output=wish)
    decision.output_stride = decision.spec.output.stride if wish is None else wish.stride()
    decision.like_query = query.shape == decision.spec.output.shape and (
        torch.empty_like(without_data(query)).stride() == decision.output_stride
    )
    wanted = [checks.remedied(decision.spec, device)]
    if gradient:
        wanted.append(decision.backward_spec(decision.spec.output))
        grads = (wanted[1].grad_query, wanted[1].grad_key, wanted[1].grad_value)
        raw = (query, key, value)
        decision.like_inputs = decision.as_is and grads == tuple(
            layout_of(torch.empty_like(without_data(t))) for t in raw
        )
    version, unavailable = library_version()
    reasons += unavailable
    found = [reason for spec in wanted for reason in checks.check(spec, device, version)]
    decision.reasons = distinct([*reasons, *found])
    if not decision.reasons:
        way = _shared_way(wanted, decision)
        if way is not None:
            _find_plans(decision, [lengths.shared(spec, way) for spec in wanted])
            if decision.served and query.is_cuda:
                decision.told = lengths.tell(wanted, way, query.device)
        refused = not decision.served and ALONE.issuperset(r.rule for r in decision.reasons)
        if way is None or refused:
            _find_plans(decision, wanted)
    return decision


def _shared_way(wanted: list[AttentionSpec], decision: Decision) -> lengths.Way | None:
    """The way in which a call runs on plans for many lengths, None where on its own."""
    device = decision.device
    assert device is not None
    # While a CUDA graph is captured, what such plans are told cannot be written.
    if device.described or torch.cuda.is_current_stream_capturing():
        return None
    limit = decision.options.workspace_limit

    def known() -> bool:
        keys = (plan_key(spec, device, limit) for spec in wanted)
        return all(plans.get_or_load(key) is not None for key in keys)

    return lengths.wanted(wanted, device, known)


def first_reasons(
    query: Tensor, key: Tensor, value: Tensor, device: Device | None, *, chosen: bool = False
) -> list[Reason]:
    """Why cuDNN does not compute a call, as far as it shows before there is a spec.

    Args:
        query, key, value: the caller's tensors.
        device: the GPU, if there is one.
        chosen: cuDNN was chosen already, so PyTorch's switches for its backends do not matter.
    """
    # What the user set says nothing about a GPU that is not here.
    reasons = [] if device and device.described else _policy(chosen)
    if device is None:
        reasons.append(not_on_cuda(query))
    if query.dim() not in (3, 4):
        reasons.append(
            Reason("ndim", f"the tensors must have 3 or 4 dimensions, got {query.dim()}")
        )
    if not is_half(query.dtype):
        reasons.append(checks.not_half(str(query.dtype).removeprefix("torch.")))
    if 0 in (*query.shape, *key.shape, *value.shape):
        reasons.append(Reason("empty", "a dimension is 0; there is nothing for cuDNN to compute"))
    return reasons


def describable(query: Tensor, reasons: Iterable[Reason]) -> bool:
    """Whether a spec can be made of a call, for which all reasons can then be found.

    Args:
        query: the caller's.
        reasons: those of `first_reasons`.
    """
    return query.dtype in DTYPES and NO_SPEC.isdisjoint(reason.rule for reason in reasons)


def library_version() -> tuple[int, list[Reason]]:
    """The version of cuDNN, or of the oldest that would do and why there is none."""
    try:
        return runtime.cudnn_version(), []
    except CudnnUnavailableError as error:
        return config.MIN_CUDNN, [Reason("unavailable", str(error), Kind.UNAVAILABLE)]


def plain(*tensors: Tensor) -> bool:
    """Whether these are CUDA tensors with memory of their own to look at.

    Subclasses and functorch's wrappers have none.
    """
    return (
        all(type(t) in _PLAIN for t in tensors)
        and tensors[0].is_cuda
        and not torch._C._are_functorch_transforms_active()
    )


def not_for_cudnn(query: Tensor) -> Reason:
    """The reason for a call whose tensors are not `plain`."""
    if not query.is_cuda:
        return not_on_cuda(query)
    return Reason(
        "tensor_type",
        "the tensors must be plain tensors outside of functorch transforms, got "
        f"{type(query).__name__}",
    )


def not_on_cuda(query: Tensor) -> Reason:
    """The reason for a call whose tensors no GPU can read."""
    if query.is_meta:
        return Reason("device", "this machine has no CUDA device; name a described one with gpu=")
    return Reason("device", f"the tensors must be on a CUDA device, got {query.device}")


def _find_plans(decision: Decision, wanted: list[AttentionSpec]) -> None:
    assert decision.device is not None
    slots, decision.reasons = find_plans(wanted, decision.device, decision.options.workspace_limit)
    if decision.reasons:
        return
    decision.forward = slots[0]
    spec = slots[0].plan.spec  # type: ignore[union-attr]
    decision.bare = decision.as_is and not (
        decision.gradient or spec.lse or spec.dropout_p or spec.ragged
    )
    decision.bare_but_gradient = (
        decision.as_is and decision.gradient and not (decision.options.return_lse or spec.dropout_p)
    )
    if decision.gradient:
        assert decision.spec is not None
        decision.backward[decision.spec.output.stride] = slots[1]


def find_plans(
    wanted: Iterable[AttentionSpec], device: Device, workspace_limit: int | None
) -> tuple[list[Slot], tuple[Reason, ...]]:
    """The slots of all these plans, or every reason why some are not there."""
    slots: list[Slot] = []
    reasons: list[Reason] = []
    for spec in wanted:
        slot, found = find_plan(spec, device, workspace_limit)
        reasons += found
        if slot is not None:
            slots.append(slot)
    return slots, distinct(reasons)


def find_plan(
    spec: AttentionSpec, device: Device, workspace_limit: int | None
) -> tuple[Slot | None, tuple[Reason, ...]]:
    """The slot with the plan of ``spec``, built if need be, or the reasons why there is none."""
    recording.note(spec)
    key = plan_key(spec, device, workspace_limit)
    if not device.described and key not in plans and torch.cuda.is_current_stream_capturing():
        # Loading and building allocate and synchronize, which a capture does not survive.
        return None, (not_while_captured(),)
    mode = config.settings().build
    # A backward on the plan would drop other weights than PyTorch's forward did.
    if mode == "background" and (spec.dropout_p or device.described):
        mode = "now"
    if mode == "now":
        slot = plans.get_or_build(key)
    else:
        found = plans.get_or_load(key)
        if found is None and mode == "never":
            message = f"no plan is there, and {config.BUILD}=never compiles none; compile it ahead "
            message += "of time with `cudnn-mha compile`"
            return None, (Reason("not_compiled", message, Kind.UNAVAILABLE),)
        if found is None:
            background.want(key)
            message = f"its plan is being compiled, since {config.BUILD}=background"
            return None, (Reason("compiling", message, Kind.UNAVAILABLE),)
        slot = found
    if slot.refusal is not None:
        return None, (slot.refusal,)
    return slot, ()


def check_and_find(
    spec: AttentionSpec, device: Device, workspace_limit: int | None
) -> tuple[Slot | None, tuple[Reason, ...]]:
    """`find_plan` of a spec that no rule speaks against, else the rules' reasons."""
    version, unavailable = library_version()
    reasons = (*unavailable, *checks.check(spec, device, version))
    return (None, reasons) if reasons else find_plan(spec, device, workspace_limit)


def not_while_captured() -> Reason:
    """The reason for a call that was never made before a capture."""
    message = "no plan is there yet, and none can be made while a CUDA graph is captured; "
    message += "run the call once before the capture"
    return Reason("capture", message, Kind.UNAVAILABLE)


def distinct(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Each reason once, in order."""
    return tuple(dict.fromkeys(reasons))


def _policy(chosen: bool) -> list[Reason]:
    """What the user said about cuDNN; of its switches only ours where PyTorch chose it."""
    reasons = []
    if config.settings().disabled:
        reasons.append(Reason("disabled", f"{config.DISABLED}=1 is set", Kind.POLICY))
    if not chosen and not cudnn_allowed():
        reasons.append(
            Reason(
                "sdp_backend",
                "torch.backends.cuda.enable_cudnn_sdp(False) or the surrounding sdpa_kernel() "
                "excludes cuDNN",
                Kind.POLICY,
            )
        )
    return reasons


class _Exclusion:
    """PyTorch's switch for its cuDNN backend is one for the whole process.

    While a fallback has it off, other threads must neither take that for the user's wish nor
    restore the wrong state: hence the lock, and `active` for all of them to see.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.active = False


_exclusion = _Exclusion()


def cudnn_allowed() -> bool:
    """Whether the user lets cuDNN compute attention."""
    return bool(torch._C._get_cudnn_sdp_enabled()) or _exclusion.active


def fall_back(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    decision: Decision,
    reasons: tuple[Reason, ...],
) -> tuple[Tensor, Tensor | None]:
    """The call computed by PyTorch: output, and the log-sum-exp where it is asked for.

    Raises:
        CudnnSdpaUnsupportedError: no fallback is allowed, or the user allows no other backend.
    """
    name = _describe(query, key, value, mask, decision)
    stuck = query.is_cuda and not any(_other_backends())
    if stuck:
        message = "enable_*_sdp() or the surrounding sdpa_kernel() allows no other backend either"
        reasons += (Reason("no_backend", message, Kind.POLICY),)
    if stuck or not decision.options.fallback:
        raise CudnnSdpaUnsupportedError(name, reasons)
    if query.is_cuda:
        log_fallback(name, reasons)
    return compute(query, key, value, mask, decision.options, gradient=decision.gradient)


def needs_reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, o: Options, *, gradient: bool
) -> bool:
    """Whether `F.scaled_dot_product_attention` cannot be told the call, or may get it wrong."""
    return (
        o.return_lse
        or (o.deterministic and gradient)
        or (mask is not None and mask.dtype not in (torch.bool, query.dtype))
        or o.dropout_p == 1
        or (o.scale is not None and o.scale <= 0)
        or 0 in (*query.shape, *key.shape, *value.shape)
    )


def compute(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, o: Options, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The call computed by PyTorch, by the backends it may use other than its own cuDNN's."""
    if needs_reference(query, key, value, mask, o, gradient=gradient):
        output, lse = reference.attention(
            query, key, value, mask, o.dropout_p, o.is_causal, o.scale
        )
        return output, lse.float() if o.return_lse else None
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(1, *(mask.shape or (1,)))
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not query.is_cuda or traced:
        return _sdpa(query, key, value, mask, o), None
    choice = torch._fused_sdp_choice(
        query, key, value, mask, o.dropout_p, o.is_causal, scale=o.scale, enable_gqa=o.enable_gqa
    )
    if choice != SDPBackend.CUDNN_ATTENTION.value:
        return _sdpa(query, key, value, mask, o), None
    # cuDNN is out for a reason that holds for PyTorch's use of it too.
    with _exclusion.lock:
        _exclusion.active = True
        torch._C._set_sdp_use_cudnn(False)
        try:
            return _sdpa(query, key, value, mask, o), None
        finally:
            torch._C._set_sdp_use_cudnn(True)
            _exclusion.active = False


def _other_backends() -> tuple[bool, ...]:
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, o: Options) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        o.dropout_p,
        o.is_causal,
        scale=o.scale,
        enable_gqa=o.enable_gqa,
    )


def _describe(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, decision: Decision
) -> str:
    if decision.spec is not None:
        return str(decision.spec)
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_mask": mask}
    return " ".join(
        f"{name}={tuple(t.shape)}:{t.dtype}" for name, t in tensors.items() if t is not None
    )


_logged: set[tuple[str, ...]] = set()


def log_fallback(name: str, reasons: tuple[Reason, ...]) -> None:
    """Says once for each distinct cause that PyTorch computes instead."""
    cause = tuple(reason.rule for reason in reasons)
    if cause in _logged:
        return
    _logged.add(cause)
    text = "; ".join(map(str, reasons))
    logger.warning("attention falls back to PyTorch: %s (first seen for %s)", text, name)
