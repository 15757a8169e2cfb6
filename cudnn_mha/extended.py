"""Calls that `F.scaled_dot_product_attention` cannot say: from a caller's tensors to plans.

Sequence lengths, windows, the bottom right diagonal, soft caps, functions on the scores, ALiBi and
sinks, for padded batches and for packed ones. What a plan is given is gathered in one map from
`Uid` to tensor.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_mha import (
    attention,
    checks,
    config,
    devices,
    dispatch,
    lse_gradient,
    reference,
    runtime,
)
from cudnn_mha.cache import Slot, plans
from cudnn_mha.checks import ALIGNMENT, Kind, Reason
from cudnn_mha.devices import Device
from cudnn_mha.errors import CudnnSdpaUnsupportedError
from cudnn_mha.graph_builder import Uid
from cudnn_mha.inputs import (
    Inputs,
    Options,
    Outline,
    addressable,
    autocast,
    backward_spec,
    forward_spec,
    four_dimensional,
    outline,
    prepare,
    require_local,
    require_tensors,
    validate,
)
from cudnn_mha.padding import zero_gaps, zero_padding
from cudnn_mha.plan import Plan
from cudnn_mha.score_mod import on_tensors
from cudnn_mha.sequences import OFFSETS, Operands, batch_offsets, bucket, ragged
from cudnn_mha.spec import AttentionSpec, TensorSpec, layout_like
from cudnn_mha.terms import Terms, paper_slopes

logger = logging.getLogger("cudnn_mha")


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


RAGGED_SINKS = 92600
"""The cuDNN from which on ragged graphs have a gradient beside sinks."""

_COPIED = ("query", "key", "value")

_routes: dispatch.Decisions[Route] = dispatch.Decisions()


def padded(given: Given, options: Options, terms: Terms) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa` on these terms.

    Raises:
        CudnnSdpaUnsupportedError: no fallback is allowed, and cuDNN does not serve the call.
        ValueError, TypeError: tensors that do not fit; the message names the argument.
    """
    require_tensors(*given[:4])
    require_operands(given)
    query, key, value = (autocast(t) for t in given[:3])
    given = given._replace(query=query, key=key, value=value)
    # A window beside the mask is no contradiction, is_causal is one by PyTorch's convention.
    validate(query, key, value, given.mask, options)
    terms = dataclasses.replace(terms, alibi=terms.alibi or given.slopes is not None)
    validate_operands(given)
    output, lse = attend(given, options, terms)
    return output if lse is None else (output, lse)


def require_operands(given: Given) -> None:
    """Raises TypeError for what is no tensor, and for one that is spread over ranks."""
    names = {"seq_lens_q": given.lengths_q, "seq_lens_kv": given.lengths_kv}
    names |= {"alibi_slopes": given.slopes, "sinks": given.sinks}
    names |= {"cu_seqlens_q": given.starts_q, "cu_seqlens_kv": given.starts_kv}
    for name, tensor in names.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
    require_local(given)


def batch_of(query: Tensor, key: Tensor, value: Tensor) -> int:
    """How many sequences a padded batch has."""
    return max(t.shape[0] for t in (query, key, value)) if query.dim() == 4 else 1


def validate_operands(given: Given) -> None:
    """Raises for operands that do not fit the query."""
    query = given.query
    if query.dim() not in (3, 4):
        raise ValueError(
            f"query, key and value must have 3 or 4 dimensions, got {query.dim()}; others have no "
            "lengths, windows, alignment, soft caps, score_mod, slopes or sinks"
        )
    batch = batch_of(*given[:3])
    heads = max(t.shape[-3] for t in given[:3])  # those of the query, or what it broadcasts to
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


def attend(given: Given, options: Options, terms: Terms) -> Result:
    """Output, and log-sum-exp where it is asked for, of a valid call."""
    gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad
        for t in (given.query, given.key, given.value, given.mask, given.sinks)
    )

    def fall_back(*reasons: Reason) -> Result:
        return _fall_back(given, options, terms, reasons)

    if not dispatch.plain(*(t for t in given if t is not None)):
        return fall_back(dispatch.not_for_cudnn(given.query))
    route = decided(
        _routes,
        _signature(given, options, terms, gradient),
        lambda: describe(given, options, terms, gradient),
        lambda route: _constant_operands(route, given),
    )
    return follow(route, lambda: _run(route, given, gradient), fall_back)


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


def _signature(given: Given, options: Options, terms: Terms, gradient: bool) -> tuple[Any, ...]:
    tensors = tuple(
        None
        if t is None
        else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % ALIGNMENT)
        for t in given
    )
    wants = tuple(t is not None and t.requires_grad for t in (given.mask, given.sinks))
    return tensors, wants, options, terms, gradient, torch._C._get_cudnn_sdp_enabled()


# ----------------------------------------------------------------------------------------- decide


def describe(
    given: Given,
    options: Options,
    terms: Terms,
    gradient: bool,
    device: Device | None = None,
) -> Route:
    """How a valid call would be computed, as far as it shows before there are plans.

    Args:
        given: the caller's tensors; on ``meta`` with ``device`` given.
        options, terms: the caller's other arguments.
        gradient: some gradient will be wanted.
        device: the GPU to decide for; None takes that of the tensors.
    """
    route, reasons, device = begin(given, options, terms, device)
    if device is None:
        return route
    inputs = prepare(given.query, given.key, given.value, given.mask, options)
    lse = gradient or options.return_lse
    spec = forward_spec(inputs, options, route.outline.scale, lse=lse)
    route.terms = terms.within(spec.seq_q, spec.seq_kv, lengths=given.has_lengths)
    spec = route.terms.applied(spec, slopes=given.slopes is not None)
    spec = with_sinks(route, spec, given, gradient)
    version, _ = dispatch.library_version()
    route.manner = _manner(spec, given, gradient, device, version)
    if route.manner is Manner.CLEANED:
        copies = {n: layout_like(t.shape, t) for n, t in spec.tensors.items() if n in _COPIED}
        spec = dataclasses.replace(spec, **copies)  # type: ignore[arg-type]
    wanted = [spec]
    if gradient:
        bias_gradient = given.mask is not None and given.mask.requires_grad
        sinks_gradient = given.sinks is not None and given.sinks.requires_grad
        wanted.append(
            dataclasses.replace(
                backward_spec(
                    spec,
                    spec.output,
                    bias_gradient=bias_gradient,
                    deterministic=options.deterministic,
                ),
                grad_sinks=sinks_gradient,
            )
        )
    manner, gpu = route.manner, device
    settle(route, wanted, lambda spec: _told(spec, manner, gpu), reasons)
    return route


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


def _manner(
    spec: AttentionSpec, given: Given, gradient: bool, device: Device, version: int
) -> Manner:
    if not given.has_lengths:
        # Kernels for one query know no sinks, and operations of our own no ragged tensors.
        single = spec.seq_q == 1 and spec.sinks and not spec.modified
        return Manner.RAGGED if single and device.sm == 90 else Manner.FULL
    # That ragged kernels, and those for one query, keep off the padding was seen on sm_90 alone.
    if device.sm != 90 or spec.modified:
        return Manner.CLEANED
    single = spec.seq_q == 1
    if single and not gradient and given.lengths_q is None and not spec.sinks:
        return Manner.CACHE
    if spec.sinks and gradient and version < RAGGED_SINKS:
        return Manner.CLEANED
    if single and spec.bias is not None:
        return Manner.CLEANED
    return Manner.RAGGED


def _told(spec: AttentionSpec, manner: Manner, device: Device) -> AttentionSpec:
    """The spec of the graph that computes ``spec`` with its lengths told in this manner."""
    if manner is Manner.RAGGED:
        if spec.bias is not None or config.settings().lengths == "exact":
            # With a single query the log-sum-exp and the gradients of ragged kernels are wrong.
            return ragged(spec, max(spec.seq_q, 2), spec.seq_kv)
        return ragged(spec, bucket(spec.seq_q), bucket(spec.seq_kv))
    if manner in (Manner.CACHE, Manner.CLEANED):
        return dataclasses.replace(spec, lengths=True)
    return checks.remedied(spec, device)


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


def _constant_operands(route: Route, given: Given) -> Operands:
    """What plans are told that no call of the signature changes."""
    assert route.spec is not None and route.forward is not None
    spec, device = route.spec, given.query.device
    operands: Operands = {}
    for uid, length in ((Uid.SEQ_LEN_Q, spec.seq_q), (Uid.SEQ_LEN_KV, spec.seq_kv)):
        operands[uid] = torch.full((spec.batch,), length, dtype=torch.int32, device=device)
    if route.manner is Manner.RAGGED:
        operands |= batch_offsets(spec, device)
    if spec.slopes:
        operands[Uid.SLOPES] = torch.tensor(paper_slopes(spec.heads_q), device=device)
    torch.cuda.current_stream(device).synchronize()  # calls on other streams read these
    return operands


# -------------------------------------------------------------------------------------------- run


def _run(route: Route, given: Given, gradient: bool) -> tuple[Tensor, Tensor | None]:
    assert route.spec is not None and route.forward is not None
    spec = route.spec
    sinks = None if given.sinks is None else given.sinks.float().contiguous()
    # Softmax with a sink is not invariant to what is subtracted from the keys' scores alone.
    shifted = sinks is None or route.sinks_after
    inputs = prepare(*given[:4], route.options, shifted=shifted)
    operands, hidden_q, hidden_kv = _lengths(route, given)
    query, key, value, bias, shift = inputs
    if hidden_q is not None and hidden_kv is not None:
        query = _cleaned(query, spec.query, hidden_q)
        key, value = _cleaned(key, spec.key, hidden_kv), _cleaned(value, spec.value, hidden_kv)
    if given.slopes is not None:
        operands[Uid.SLOPES] = given.slopes.detach().float().contiguous()
    if route.options.dropout_p:
        operands[Uid.DROPOUT_SEED], operands[Uid.DROPOUT_OFFSET] = attention.draw(query.device)
    output, lse = run_plans(
        Inputs(query, key, value, bias, None), sinks, spec.output, operands, route, gradient
    )
    output = output[..., : route.outline.dim_v]
    if hidden_q is not None:
        output = output.masked_fill(hidden_q, 0)
        lse = None if lse is None else lse.masked_fill(hidden_q[..., 0], -torch.inf)
    if lse is not None and shift is not None:
        lse = lse + shift.squeeze(-1)
    if lse is not None and sinks is not None:
        if route.sinks_after:
            output, lse = apply_sinks(output, lse, sinks, given.lengths_q)
        elif given.lengths_kv is not None:
            lse = with_sinks_alone(lse, sinks, given.lengths_q, given.lengths_kv)
    if route.outline.ndim == 3:
        output, lse = output[0], None if lse is None else lse[0]
    return output, lse if route.options.return_lse else None


def apply_sinks(
    output: Tensor, lse: Tensor, sinks: Tensor, lengths_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp ``(B, H, S)`` of one that knew of no sinks, with them."""
    sinks = sinks[:, None]
    share = torch.sigmoid(lse - sinks)  # what the keys keep: exp(lse) / (exp(lse) + exp(sink))
    total = torch.logaddexp(lse, sinks)
    if lengths_q is not None:
        index = torch.arange(lse.shape[2], device=lse.device)
        total = total.masked_fill((index >= lengths_q[:, None])[:, None], -torch.inf)
    return (output * share[..., None]).to(output.dtype), total


def with_sinks_alone(
    lse: Tensor, sinks: Tensor, lengths_q: Tensor | None, lengths_kv: Tensor
) -> Tensor:
    """The log-sum-exp ``(B, H, S)`` of sequences without keys: the sink is all that is summed."""
    alone = (lengths_kv <= 0)[:, None]
    if lengths_q is not None:
        index = torch.arange(lse.shape[2], device=lse.device)
        alone = alone & (index < lengths_q[:, None])
    return torch.where(alone[:, None], sinks[:, None], lse)


def _lengths(route: Route, given: Given) -> tuple[Operands, Tensor | None, Tensor | None]:
    """The operands of a call that tell its lengths, and what of queries and keys is padding.

    The latter ``(B, 1, S, 1)``, and None where nothing has to be hidden from the kernel.
    """
    assert route.spec is not None
    operands = dict(route.operands)
    runtime.keep_for_captures(route)
    if not given.has_lengths:
        return operands, None, None
    sides = (
        (Uid.SEQ_LEN_Q, given.lengths_q, route.spec.seq_q),
        (Uid.SEQ_LEN_KV, given.lengths_kv, route.spec.seq_kv),
    )
    for uid, lengths, size in sides:
        if lengths is not None:
            operands[uid] = lengths.clamp(0, size).to(torch.int32)
    lengths_q, lengths_kv = operands[Uid.SEQ_LEN_Q], operands[Uid.SEQ_LEN_KV]
    if route.manner is not Manner.CLEANED:
        return operands, None, None
    # Kernels skip a sequence of length 0 and leave its rows as they were.
    empty = (lengths_q == 0) | (lengths_kv == 0)
    operands[Uid.SEQ_LEN_Q] = lengths_q.masked_fill(empty, 1)
    operands[Uid.SEQ_LEN_KV] = lengths_kv.masked_fill(empty, 1)
    hidden = []
    for size, lengths in ((route.spec.seq_q, lengths_q), (route.spec.seq_kv, lengths_kv)):
        index = torch.arange(size, device=lengths.device)
        beyond = (index >= lengths[:, None]) | empty[:, None]
        hidden.append(beyond[:, None, :, None])
    return operands, hidden[0], hidden[1]


def _cleaned(tensor: Tensor, layout: TensorSpec, hidden: Tensor) -> Tensor:
    """A dense copy with zeros where it is padding."""
    copy = tensor.new_empty_strided(layout.shape, layout.stride)
    return copy.copy_(tensor).masked_fill_(hidden, 0)


def run_plans(
    inputs: Inputs,
    sinks: Tensor | None,
    output: TensorSpec,
    operands: Operands,
    route: Route,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp of tensors that a route's plans can address, with their gradients.

    Args:
        inputs: query, key, value and bias.
        sinks: ``(Hq,)`` float32; the plans are not told of them where they are applied later.
        output: layout of the output.
        operands: what else the plans are told.
        route: whose plans.
        gradient: gradients are wanted.
    """
    if route.sinks_after:
        sinks = None
    if gradient:
        result: tuple[Tensor, Tensor] = _Attention.apply(
            *inputs[:4], sinks, output, operands, route
        )
        return result
    return _forward(*inputs[:4], sinks, output, operands, route)


def _execute(slot: Slot, operands: Operands) -> None:
    plans.touch(slot)
    plan: Plan = slot.plan  # type: ignore[assignment]
    attention.run(plan, [operands[uid].data_ptr() for uid in plan.takes])


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    layout: TensorSpec,
    operands: Operands,
    route: Route,
) -> tuple[Tensor, Tensor | None]:
    assert route.forward is not None and route.forward.plan is not None
    partial = route.manner is Manner.RAGGED
    output = query.new_empty_strided(layout.shape, layout.stride)
    if partial:
        _zero_rest(output, Uid.OUTPUT, route, operands)
    tensors: Operands = {Uid.QUERY: query, Uid.KEY: key, Uid.VALUE: value, Uid.OUTPUT: output}
    if bias is not None:
        tensors[Uid.BIAS] = bias
    if sinks is not None:
        tensors[Uid.SINKS] = sinks
    lse = None
    if route.forward.plan.spec.lse:
        lse = _empty_lse(output, by_token=partial)
        tensors[Uid.LSE] = lse
    _execute(route.forward, operands | tensors)
    return output, lse


def _zero_rest(tensor: Tensor, uid: Uid, route: Route, operands: Operands) -> None:
    """Zeros in the rows of an output that a ragged kernel does not write."""
    lengths = operands[Uid.SEQ_LEN_Q], operands[Uid.SEQ_LEN_KV]
    own, other = lengths if uid in (Uid.OUTPUT, Uid.GRAD_QUERY) else lengths[::-1]
    if route.packed:
        zero_gaps(tensor, operands[Uid[f"OFFSET_{uid.name}"]], own, other)
    else:
        zero_padding(tensor, own, other)


def _empty_lse(output: Tensor, *, by_token: bool) -> Tensor:
    """``(B, H, S)``, or ``(H, tokens)`` of a packed output."""
    if not by_token:
        return output.new_empty(output.shape[:-1], dtype=torch.float32)
    if output.dim() == 3:
        return output.new_full(output.shape[:-1], -torch.inf, dtype=torch.float32).mT
    batch, heads, seq, _ = output.shape
    rows = output.new_full((batch, seq, heads), -torch.inf, dtype=torch.float32)
    return rows.transpose(1, 2)


class _Attention(torch.autograd.Function):
    """Stashes the tensors, the output, the log-sum-exp, and what the plans were told."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        layout: TensorSpec,
        operands: Operands,
        route: Route,
    ) -> tuple[Tensor, Tensor]:
        output, lse = _forward(query, key, value, bias, sinks, layout, operands, route)
        assert lse is not None
        ctx.save_for_backward(query, key, value, bias, sinks, output, lse, *operands.values())
        ctx.operands = tuple(operands)
        ctx.route = route
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> Any:
        attention.refuse_second_order()
        query, key, value, bias, sinks, output, lse, *rest = ctx.saved_tensors
        saved = query, key, value, bias, sinks, output, lse
        operands = dict(zip(ctx.operands, rest, strict=True))
        if grad_lse is not None:
            gradients = _through_lse(ctx.route, grad_output, grad_lse, *saved, operands)
        elif grad_output is not None:
            gradients = run_backward(ctx.route, grad_output, *saved, operands)
        else:
            return (None,) * 8
        return (*gradients, None, None, None)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Those of query, key, value, bias and sinks."""


def _through_lse(
    route: Route,
    grad_output: Tensor | None,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
    operands: Operands,
) -> Gradients:
    """The gradients where the log-sum-exp has one too; see `lse_gradient`."""
    wide = _widened(route)
    assert wide.spec is not None
    dim = value.shape[-1]
    rows, grad_rows = (t.mT if route.packed else t for t in (lse, grad_lse))
    value, output, grad_output = lse_gradient.widen(
        wide.spec, value, output, rows, grad_output, grad_rows
    )
    operands = operands | _widened_offsets(route, wide, operands)
    grad_query, grad_key, grad_value, grad_bias, grad_sinks = run_backward(
        wide, grad_output, query, key, value, bias, sinks, output, lse, operands
    )
    return grad_query, grad_key, grad_value[..., :dim], grad_bias, grad_sinks


def _widened(route: Route) -> Route:
    """The route whose backward takes a gradient of the log-sum-exp; see `lse_gradient`."""
    if route.wide is None:
        assert route.spec is not None and route.device is not None and route.told is not None
        spec = lse_gradient.widened(route.spec)
        graph, limit = route.told(spec), route.options.workspace_limit
        slot, reasons = dispatch.check_and_find(graph, route.device, limit)
        if slot is None:
            raise lse_gradient.no_gradient(reasons)
        route.wide = dataclasses.replace(route, spec=spec, graphs=(graph,), backward=slot)
    return route.wide


def _widened_offsets(narrow: Route, wide: Route, operands: Operands) -> Operands:
    """Where sequences lie in the tensors that were widened."""
    unit = 2 if narrow.packed else 0  # packed sequences lie so many tokens apart, others batches
    found: Operands = {}
    for uid, name in OFFSETS.items():
        if uid in operands:
            old, new = (getattr(r.spec, name).stride[unit] for r in (narrow, wide))
            found[uid] = operands[uid] if old == new else operands[uid] // old * new
    return found


def run_backward(
    route: Route,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
    operands: Operands,
) -> Gradients:
    """The gradients that a route's backward plan computes."""
    assert route.spec is not None and route.backward is not None
    spec = route.spec
    partial = route.manner is Manner.RAGGED
    if grad_output.stride() != output.stride() or not addressable(grad_output):
        grad_output = torch.empty_like(output).copy_(grad_output)
    if bias is not None or spec.modified:
        # Weights exp(score - lse) of a row without keys: exp(-inf), not exp(-inf + inf).
        lse = lse.clone().masked_fill_(lse == -torch.inf, torch.inf)  # in its own layout
    tensors: Operands = {
        Uid.QUERY: query,
        Uid.KEY: key,
        Uid.VALUE: value,
        Uid.OUTPUT: output,
        Uid.LSE: lse,
        Uid.GRAD_OUTPUT: grad_output,
    }
    layouts = (spec.grad_query, spec.grad_key, spec.grad_value)
    uids = (Uid.GRAD_QUERY, Uid.GRAD_KEY, Uid.GRAD_VALUE)
    for uid, layout, tensor in zip(uids, layouts, (query, key, value), strict=True):
        if route.packed:
            tensors[uid] = tensor.new_empty(tensor.shape)
        else:
            tensors[uid] = _gradient(layout, query)
        if partial:
            _zero_rest(tensors[uid], uid, route, operands)
    if bias is not None:
        tensors[Uid.BIAS] = bias
    if spec.grad_bias is not None:
        tensors[Uid.GRAD_BIAS] = _gradient(spec.grad_bias, query).zero_()
    if sinks is not None:
        tensors[Uid.SINKS] = sinks
        if spec.grad_sinks:
            tensors[Uid.GRAD_SINKS] = torch.zeros_like(sinks)
    _execute(route.backward, operands | tensors)
    grad_bias = tensors.get(Uid.GRAD_BIAS)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return (
        *(tensors[uid] for uid in uids),  # type: ignore[return-value]
        grad_bias,
        tensors.get(Uid.GRAD_SINKS),
    )


def _gradient(layout: TensorSpec | None, like: Tensor) -> Tensor:
    assert layout is not None
    return like.new_empty_strided(layout.shape, layout.stride)


# -------------------------------------------------------------------------------------- fall back


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


def _fall_back(
    given: Given, options: Options, terms: Terms, reasons: tuple[Reason, ...]
) -> tuple[Tensor, Tensor | None]:
    """The call by plain PyTorch, if that is allowed."""
    accept(given, options, reasons)
    # The reference has no batch of one for three dimensions, and broadcasts no heads of the query.
    query, key, value = four_dimensional(*given[:3], options)
    lengths = [
        None if n is None else n.clamp(0, t.shape[-2])
        for n, t in ((given.lengths_q, query), (given.lengths_kv, key))
    ]
    output, lse = reference.attention(
        query,
        key,
        value,
        given.mask,
        options.dropout_p,
        scale=options.scale,
        seq_lens_q=lengths[0],
        seq_lens_kv=lengths[1],
        bottom_right=terms.bottom_right,
        window=terms.window,
        softcap=terms.softcap or None,
        score_mod=None if terms.score_mod is None else on_tensors(terms.score_mod),
        alibi_slopes=slopes_of(given._replace(query=query), terms),
        sinks=given.sinks,
    )
    if given.query.dim() == 3:
        output, lse = output[0], lse[0]
    return output, lse.float() if options.return_lse else None
