"""Calls on `(B, H, S, D)` that `F.scaled_dot_product_attention` cannot say.

Sequence lengths, windows, the bottom right diagonal, soft caps, functions on the scores, ALiBi and
sinks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_mha import (
    attention,
    checks,
    config,
    dispatch,
    reference,
    runtime,
)
from cudnn_mha.checks import ALIGNMENT, Reason
from cudnn_mha.devices import Device
from cudnn_mha.execution import apply_sinks, run_plans, with_sinks_alone
from cudnn_mha.graph_builder import Uid
from cudnn_mha.inputs import (
    Inputs,
    Options,
    autocast,
    backward_spec,
    forward_spec,
    four_dimensional,
    prepare,
    require_tensors,
    row_shift,
    validate,
)
from cudnn_mha.routes import (
    Given,
    Manner,
    Result,
    Route,
    accept,
    begin,
    decided,
    follow,
    require_operands,
    settle,
    slopes_of,
    validate_operands,
    with_sinks,
)
from cudnn_mha.score_mod import on_tensors
from cudnn_mha.sequences import Operands, batch_offsets, bucket, ragged
from cudnn_mha.spec import AttentionSpec, TensorSpec, layout_like
from cudnn_mha.terms import Terms, paper_slopes

RAGGED_SINKS = 92600
"""The cuDNN from which on ragged graphs have a gradient beside sinks."""


_COPIED = ("query", "key", "value")


_routes: dispatch.Decisions[Route] = dispatch.Decisions()


def compute(given: Given, options: Options, terms: Terms) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa` on these terms.

    Raises:
        CudnnSdpaUnsupportedError: no fallback is allowed, and cuDNN does not serve the call.
        ValueError, TypeError: tensors that do not fit; the message names the argument.
    """
    given = checked(given, options)
    terms = dataclasses.replace(terms, alibi=terms.alibi or given.slopes is not None)
    output, lse = attend(given, options, terms)
    return output if lse is None else (output, lse)


def checked(given: Given, options: Options) -> Given:
    """The tensors of a call as autocast has them.

    Raises:
        ValueError, TypeError: tensors that do not fit; the message names the argument.
    """
    require_tensors(*given[:4])
    require_operands(given)
    query, key, value = (autocast(t) for t in given[:3])
    given = given._replace(query=query, key=key, value=value)
    # A window beside the mask is no contradiction, is_causal is one by PyTorch's convention.
    validate(query, key, value, given.mask, options)
    validate_given(given)
    return given


def validate_given(given: Given) -> None:
    """Raises for operands that do not fit the query."""
    query = given.query
    if query.dim() not in (3, 4):
        raise ValueError(
            f"query, key and value must have 3 or 4 dimensions, got {query.dim()}; others have no "
            "lengths, windows, alignment, soft caps, score_mod, slopes or sinks"
        )
    heads = max(t.shape[-3] for t in given[:3])  # those of the query, or what it broadcasts to
    validate_operands(given, batch_of(*given[:3]), heads)


def batch_of(query: Tensor, key: Tensor, value: Tensor) -> int:
    """How many sequences a padded batch has."""
    return max(t.shape[0] for t in (query, key, value)) if query.dim() == 4 else 1


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
    route = find(given, options, terms, gradient)
    return follow(route, lambda: run(route, given, gradient), fall_back)


def find(
    given: Given, options: Options, terms: Terms, gradient: bool, *, chosen: bool = False
) -> Route:
    """The route of a valid call, with its plans or the reasons why there are none.

    Args:
        given: CUDA tensors with memory of their own.
        options, terms: the call's other arguments.
        gradient: gradients will be wanted; of the mask and the sinks where these require them.
        chosen: cuDNN was chosen already, so PyTorch's switches for its backends do not matter.
    """
    return decided(
        _routes,
        (*_signature(given, options, terms, gradient), chosen),
        lambda: describe(given, options, terms, gradient, chosen=chosen),
        lambda route: _constant_operands(route, given),
    )


def _signature(given: Given, options: Options, terms: Terms, gradient: bool) -> tuple[Any, ...]:
    tensors = tuple(
        None
        if t is None
        else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % ALIGNMENT)
        for t in given
    )
    wants = tuple(t is not None and t.requires_grad for t in (given.mask, given.sinks))
    return tensors, wants, options, terms, gradient, torch._C._get_cudnn_sdp_enabled()


def describe(
    given: Given,
    options: Options,
    terms: Terms,
    gradient: bool,
    device: Device | None = None,
    *,
    chosen: bool = False,
) -> Route:
    """How a valid call would be computed, as far as it shows before there are plans.

    Args:
        given: the caller's tensors; on ``meta`` with ``device`` given.
        options, terms: the caller's other arguments.
        gradient: some gradient will be wanted.
        device: the GPU to decide for; None takes that of the tensors.
        chosen: as for `find`.
    """
    route, reasons, device = begin(given, options, terms, device, chosen=chosen)
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
    decoding = not (spec.sinks or spec.alibi or spec.dropout_p)  # whose kernels keep off padding
    if single and not gradient and given.lengths_q is None and decoding:
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


class Call(NamedTuple):
    """A call as the plans of its route take it.

    Attributes:
        inputs: tensors that cuDNN can address, without what it must not read.
        sinks: ``(Hq,)`` float32, or None.
        operands: what else the plans are told.
        hidden_q, hidden_kv: what of queries and keys is padding that the plans do not know of,
            ``(B, 1, S, 1)``, or None.
    """

    inputs: Inputs
    sinks: Tensor | None
    operands: Operands
    hidden_q: Tensor | None
    hidden_kv: Tensor | None


Drawn = tuple[Tensor, Tensor]
"""Seed and offset of the dropout, 0-d int64."""


def prepared(route: Route, given: Given, drawn: Drawn | None = None) -> Call:
    """The call of a route that has plans.

    Args:
        route: that of the call.
        given: the caller's tensors.
        drawn: the dropout's seed; None draws one where there is dropout.
    """
    assert route.spec is not None
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
        seed, offset = attention.draw(query.device) if drawn is None else drawn
        operands[Uid.DROPOUT_SEED], operands[Uid.DROPOUT_OFFSET] = seed, offset
    return Call(Inputs(query, key, value, bias, shift), sinks, operands, hidden_q, hidden_kv)


def without_padding(route: Route, call: Call, output: Tensor, lse: Tensor | None) -> Result:
    """What the plans gave, with zeros and -inf for what they did not know to be padding."""
    output = output[..., : route.outline.dim_v]
    if call.hidden_q is not None:
        output = output.masked_fill(call.hidden_q, 0)
        lse = None if lse is None else lse.masked_fill(call.hidden_q[..., 0], -torch.inf)
    return output, lse


def run(route: Route, given: Given, gradient: bool) -> Result:
    """Output, and log-sum-exp where the options ask for it, by a route that has plans.

    Args:
        route: that of the call.
        given: the caller's tensors.
        gradient: autograd shall know of it.
    """
    assert route.spec is not None
    call = prepared(route, given)
    sinks, shift = call.sinks, call.inputs.shift
    output, lse = run_plans(call.inputs, sinks, route.spec.output, call.operands, route, gradient)
    output, lse = without_padding(route, call, output, lse)
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


def _fall_back(
    given: Given, options: Options, terms: Terms, reasons: tuple[Reason, ...]
) -> tuple[Tensor, Tensor | None]:
    """The call by plain PyTorch, if that is allowed."""
    accept(given, options, reasons)
    output, lse = by_reference(given, options, terms)
    return output, lse if options.return_lse else None


def by_reference(given: Given, options: Options, terms: Terms) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by plain PyTorch."""
    # The reference has no batch of one for three dimensions, and broadcasts no heads of the query.
    query, key, value = four_dimensional(*given[:3], options)
    call = given._replace(query=query, key=key, value=value)
    mask, shift = given.mask, None
    if mask is not None and mask.dtype != torch.bool and given.sinks is None:
        # Of scores near -1e9 float32 keeps nothing: the rows are shifted, as they are for cuDNN.
        shift = row_shift(mask)
        mask = mask.to(torch.promote_types(mask.dtype, torch.float32)) - shift
    output, lse = reference.attention(
        query,
        key,
        value,
        mask,
        options.dropout_p,
        scale=options.scale,
        score_mod=None if terms.score_mod is None else on_tensors(terms.score_mod),
        **terms_of_the_reference(call, terms),
    )
    if shift is not None:
        lse = lse + shift.squeeze(-1)
    if given.query.dim() == 3:
        output, lse = output[0], lse[0]
    return output, lse.float()


def terms_of_the_reference(given: Given, terms: Terms) -> dict[str, Any]:
    """What `reference` calls the terms, of tensors ``(B, H, S, D)``; but a score_mod."""
    lengths = [
        None if n is None else n.clamp(0, t.shape[-2])
        for n, t in ((given.lengths_q, given.query), (given.lengths_kv, given.key))
    ]
    return {
        "seq_lens_q": lengths[0],
        "seq_lens_kv": lengths[1],
        "bottom_right": terms.bottom_right,
        "window": terms.window,
        "softcap": terms.softcap or None,
        "alibi_slopes": slopes_of(given, terms),
        "sinks": given.sinks,
    }
