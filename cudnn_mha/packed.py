"""Sequences of different lengths packed one after another, without padding between them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_mha import (
    attention,
    config,
    devices,
    dispatch,
    padded,
    reference_layouts,
    runtime,
)
from cudnn_mha.checks import ALIGNMENT, Reason
from cudnn_mha.devices import Device
from cudnn_mha.execution import run_plans
from cudnn_mha.graph_builder import Uid
from cudnn_mha.inputs import (
    Inputs,
    Options,
    addressable_copy,
    autocast,
    backward_spec,
    layout_of,
    pad_to_8,
    require_alike,
    require_tensors,
    sign_moved,
    validate_numbers,
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
    require_fit,
    require_operands,
    settle,
    slopes_of,
    validate_operands,
)
from cudnn_mha.sequences import (
    Operands,
    bucket,
    bucket_of_tokens,
    on_host,
    ragged,
    require_lengths,
    require_starts,
)
from cudnn_mha.spec import AttentionSpec, Direction, TensorSpec, contiguous_stride
from cudnn_mha.terms import Terms, paper_slopes

_routes: dispatch.Decisions[Route] = dispatch.Decisions()


def compute(
    given: Given, longest_q: int, longest_kv: int, options: Options, terms: Terms
) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa_varlen` on these terms.

    Raises:
        CudnnSdpaUnsupportedError: no fallback is allowed, and cuDNN does not serve the call.
        ValueError, TypeError, RuntimeError: tensors that do not fit; the message names them.
    """
    given = checked(given, longest_q, longest_kv, options)
    terms = dataclasses.replace(terms, alibi=terms.alibi or given.slopes is not None)
    output, lse = attend(given, longest_q, longest_kv, options, terms)
    return output if lse is None else (output, lse)


def checked(given: Given, longest_q: int, longest_kv: int, options: Options) -> Given:
    """The tensors of a call as autocast has them.

    Raises:
        ValueError, TypeError, RuntimeError: tensors that do not fit; the message names them.
    """
    require_tensors(*given[:3], None)
    require_operands(given)
    query, key, value = (autocast(t) for t in given[:3])
    given = given._replace(query=query, key=key, value=value)
    validate(given, longest_q, longest_kv, options)
    return given


def validate(given: Given, longest_q: int, longest_kv: int, options: Options) -> None:
    """Raises for what means nothing; the message names the argument."""
    query, key, value = given[:3]
    validate_numbers(options)
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} must be packed, (tokens, H, D), got {tuple(tensor.shape)}; padded batches "
                "go to cudnn_sdpa"
            )
    require_alike(tensors)
    if key.shape[0] != value.shape[0]:
        raise ValueError(
            f"key and value must have the same tokens, got {key.shape[0]} and {value.shape[0]}"
        )
    assert given.starts_q is not None and given.starts_kv is not None
    shape = tuple(given.starts_q.shape)
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must be of shape (B + 1,), got {shape}")
    require_fit("cu_seqlens_q", given.starts_q, shape, query, whole=True)
    require_fit("cu_seqlens_kv", given.starts_kv, shape, query, whole=True)
    require_starts("cu_seqlens_q", given.starts_q, query.shape[0])
    require_starts("cu_seqlens_kv", given.starts_kv, key.shape[0])
    validate_operands(given, shape[0] - 1, query.shape[1])
    for name, lengths, starts in (
        ("seq_lens_q", given.lengths_q, given.starts_q),
        ("seq_lens_kv", given.lengths_kv, given.starts_kv),
    ):
        if lengths is not None and on_host(starts):
            require_lengths(name, lengths, starts.diff().tolist(), "what its slot has")
    for name, longest in (("max_seqlen_q", longest_q), ("max_seqlen_kv", longest_kv)):
        if isinstance(longest, bool) or not isinstance(longest, int | torch.SymInt):
            raise TypeError(f"{name} must be a whole number, got {longest!r}")
        if torch.compiler.is_compiling():
            torch._check(longest >= 0)  # of a number that is known only when it runs, too
        elif longest < 0:
            raise ValueError(f"{name} must not be negative, got {longest}")


def attend(given: Given, longest_q: int, longest_kv: int, options: Options, terms: Terms) -> Result:
    assert given.starts_q is not None
    gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*given[:3], given.sinks)
    )
    longest_q, longest_kv = within_tokens(given, longest_q, longest_kv)
    longest = longest_q, longest_kv

    def fall_back(*reasons: Reason) -> Result:
        return _fall_back(given, *longest, options, terms, reasons)

    if not dispatch.plain(*(t for t in given if t is not None)):
        return fall_back(dispatch.not_for_cudnn(given.query))
    if 0 in (*given.query.shape, *given.key.shape, *given.value.shape, *longest):
        return fall_back(Reason("empty", "there is nothing for cuDNN to compute"))
    if goes_through_padding(given, gradient, None):
        return _through_padding(given, *longest, options, terms)
    route = find(given, *longest, options, terms, gradient)
    return follow(route, lambda: run(route, given, *longest, gradient), fall_back)


def find(
    given: Given,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    gradient: bool,
    *,
    chosen: bool = False,
) -> Route:
    """The route of a valid call, with its plans or the reasons why there are none.

    Args:
        given: CUDA tensors with memory of their own, none of them empty.
        longest_q, longest_kv: the longest sequences.
        options, terms: the call's other arguments.
        gradient: gradients will be wanted.
        chosen: cuDNN was chosen already, so PyTorch's switches for its backends do not matter.
    """
    sizes = _sizes(given, longest_q, longest_kv)
    return decided(
        _routes,
        (*_signature(given, sizes, options, terms, gradient), chosen),
        lambda: _describe(given, sizes, options, terms, gradient, chosen),
        lambda route: _constant_operands(route, given),
    )


def within_tokens(given: Given, longest_q: int, longest_kv: int) -> tuple[int, int]:
    """No sequence is longer than all tokens, whatever the caller says."""
    return min(longest_q, given.query.shape[0]), min(longest_kv, given.key.shape[0])


def goes_through_padding(given: Given, gradient: bool, device: Device | None) -> bool:
    """Whether a call is computed on a padded batch."""
    if device is None and given.query.is_cuda:
        device = devices.cuda(given.query.device.index)
    if gradient and device is not None and device.sm // 10 in (8, 12):
        return True  # there cuDNN has no gradient of packed sequences
    sinks_gradient = given.sinks is not None and gradient
    return sinks_gradient and dispatch.library_version()[0] < padded.RAGGED_SINKS


def describe(
    given: Given,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    gradient: bool,
    device: Device | None,
) -> Route:
    """How a valid call would be computed, without its plans; see `padded.describe`."""
    longest_q, longest_kv = within_tokens(given, longest_q, longest_kv)
    if goes_through_padding(given, gradient, device):
        call, _, _ = on_padding(given, longest_q, longest_kv)
        return padded.describe(call, options, terms, gradient, device)
    sizes = _sizes(given, longest_q, longest_kv)
    return _describe(given, sizes, options, terms, gradient, False, device)


class Side(NamedTuple):
    """Where packed tokens, of queries or of keys, lie in a padded batch.

    Attributes:
        lengths: ``(B,)`` how many belong to each sequence.
        places: ``(B, S)`` the token of each row; any token for padding.
        goals: ``(B * S,)`` likewise, but one behind the last token for padding.
        tokens: how many there are.
    """

    lengths: Tensor
    places: Tensor
    goals: Tensor
    tokens: int

    def padded(self, tensor: Tensor) -> Tensor:
        """``(B, H, S, ...)`` of ``(tokens, H, ...)``."""
        return tensor[self.places].transpose(1, 2)

    def packed(self, result: Tensor, rest: float = 0.0) -> Tensor:
        """``(tokens, H, ...)`` of ``(B, H, S, ...)``; ``rest`` for tokens of no sequence."""
        rows = result.transpose(1, 2).flatten(0, 1)
        found = rows.new_full((self.tokens + 1, *rows.shape[1:]), rest)
        return found.index_copy(0, self.goals, rows)[:-1]


def _side(starts: Tensor, lengths: Tensor | None, longest: int, tokens: int) -> Side:
    own = _own_lengths(starts, lengths, longest)
    index = torch.arange(longest, device=starts.device)
    places = (starts[:-1, None] + index).clamp(max=tokens - 1)
    goals = torch.where(index < own[:, None], places, tokens).flatten()
    return Side(own, places, goals, tokens)


def on_padding(given: Given, longest_q: int, longest_kv: int) -> tuple[Given, Side, Side]:
    """A call of some tokens on a padded batch, and where its queries and its keys lie there."""
    assert given.starts_q is not None and given.starts_kv is not None
    query, key, value = given[:3]
    # The kernels for one query have neither sinks nor, beside one key, a gradient.
    queries = _side(given.starts_q, given.lengths_q, max(longest_q, 2), query.shape[0])
    keys = _side(given.starts_kv, given.lengths_kv, longest_kv, key.shape[0])
    call = Given(
        queries.padded(query),
        keys.padded(key),
        keys.padded(value),
        None,
        queries.lengths,
        keys.lengths,
        given.slopes,
        given.sinks,
    )
    return call, queries, keys


def _through_padding(
    given: Given, longest_q: int, longest_kv: int, options: Options, terms: Terms
) -> Result:
    """The call as one on a padded batch."""
    call, queries, _ = on_padding(given, longest_q, longest_kv)
    output, lse = padded.attend(call, options, terms)
    return queries.packed(output), None if lse is None else queries.packed(lse, -torch.inf).mT


def _own_lengths(starts: Tensor, lengths: Tensor | None, longest: int) -> Tensor:
    """How many tokens each sequence has: those of its slot, unless something says fewer."""
    own = starts.diff().clamp(0, longest)
    return own if lengths is None else torch.minimum(own, lengths.clamp(min=0))


def _sizes(given: Given, longest_q: int, longest_kv: int) -> tuple[int, int, int, int, int]:
    """Sequences, longest ones and tokens that plans are made for, which serve all below too."""
    assert given.starts_q is not None
    batch = given.starts_q.shape[0] - 1
    tokens = given.query.shape[0], given.key.shape[0]
    if config.settings().lengths == "exact":
        return batch, max(longest_q, 2), longest_kv, *tokens
    longest = bucket(longest_q), bucket(longest_kv)
    return bucket(batch, 1), *longest, bucket_of_tokens(tokens[0]), bucket_of_tokens(tokens[1])


def _signature(
    given: Given,
    sizes: tuple[int, ...],
    options: Options,
    terms: Terms,
    gradient: bool,
) -> tuple[Any, ...]:
    tensors = tuple(
        (t.shape[1:], t.stride(), t.dtype, t.get_device(), t.data_ptr() % ALIGNMENT)
        for t in given[:3]
    )
    rest = tuple(
        None if t is None else (t.dtype, t.get_device(), t.shape, t.requires_grad)
        for t in given[3:]
    )
    return tensors, rest, sizes, options, terms, gradient, torch._C._get_cudnn_sdp_enabled()


def _describe(
    given: Given,
    sizes: tuple[int, int, int, int, int],
    options: Options,
    terms: Terms,
    gradient: bool,
    chosen: bool,
    device: Device | None = None,
) -> Route:
    batch, longest_q, longest_kv, tokens_q, tokens_kv = sizes
    route, reasons, device = begin(given, options, terms, device, chosen=chosen)
    if device is None:
        return route
    route.packed, route.manner = True, Manner.RAGGED
    bounded = gradient and _is_sparse(given, sizes)
    inputs = prepare(given, options, dense_query=bounded)
    query, key, value = (
        _as_batch(layout_of(t), batch, longest)
        for t, longest in zip(inputs[:3], (longest_q, longest_kv, longest_kv), strict=True)
    )
    shape = (tokens_q, query.shape[1], value.shape[3])
    output = TensorSpec(shape, contiguous_stride(shape), query.dtype)
    spec = AttentionSpec(
        Direction.FORWARD,
        query,
        key,
        value,
        _as_batch(output, batch, longest_q),
        scale=route.outline.scale,
        dropout_p=options.dropout_p,
        lse=gradient or options.return_lse,
    )
    route.terms = terms.within(longest_q, longest_kv, lengths=True)
    spec = route.terms.applied(spec, slopes=given.slopes is not None)
    spec = dataclasses.replace(spec, sinks=given.sinks is not None)
    wanted = [spec]
    if gradient:
        backward = backward_spec(
            spec, spec.output, bias_gradient=False, deterministic=options.deterministic
        )
        changes: dict[str, Any] = {
            f"grad_{name}": _as_batch(_contiguous(t, tokens), batch, longest)
            for name, t, tokens, longest in (
                ("query", inputs.query, tokens_q, longest_q),
                ("key", inputs.key, tokens_kv, longest_kv),
                ("value", inputs.value, tokens_kv, longest_kv),
            )
        }
        if bounded:
            changes |= {"tokens_q": tokens_q, "tokens_kv": tokens_kv}
        wanted.append(
            dataclasses.replace(
                backward,
                **changes,
                grad_sinks=given.sinks is not None and given.sinks.requires_grad,
            )
        )
    settle(route, wanted, lambda spec: ragged(spec, longest_q, longest_kv), reasons)
    return route


def _is_sparse(given: Given, sizes: tuple[int, int, int, int, int]) -> bool:
    """Whether a backward had better be told how many tokens there are at most.

    Its workspace is that of a padded batch without this bound, which is 8 to 14 % faster on an
    H200 as long as most of that batch is filled, and wastes memory and time where it is not.
    """
    batch, longest_q, longest_kv, tokens_q, tokens_kv = sizes
    filled = batch * longest_q <= 2 * tokens_q and batch * longest_kv <= 2 * tokens_kv
    takes_bound = not (given.query.shape[2] % 16 or given.value.shape[2] % 16)
    return takes_bound and not filled


def _as_batch(layout: TensorSpec, batch: int, longest: int) -> TensorSpec:
    """A packed layout ``(tokens, H, D)`` as the ``(B, H, S, D)`` that descriptors speak of."""
    _, heads, dim = layout.shape
    token, head, last = layout.stride
    return TensorSpec(
        (batch, heads, longest, dim), (longest * token, head, token, last), layout.dtype
    )


def _contiguous(tensor: Tensor, tokens: int) -> TensorSpec:
    shape = (tokens, *tensor.shape[1:])
    return TensorSpec(shape, contiguous_stride(shape), layout_of(tensor).dtype)


def prepare(given: Given, options: Options, *, dense_query: bool) -> Inputs:
    """Tensors that cuDNN can address, ``(tokens, H, D)``.

    Args:
        given: the caller's tensors.
        options: the caller's other arguments.
        dense_query: the query is copied unless it is contiguous, as a backward whose workspace is
            bounded needs it; see checks.HAZARDS.
    """
    query = sign_moved(given.query, options.scale)
    if dense_query:
        query = query.contiguous()
    query, key, value = (addressable_copy(pad_to_8(t)) for t in (query, given.key, given.value))
    return Inputs(query, key, value, None, None)


_SIDE_Q = (
    Uid.OFFSET_QUERY,
    Uid.OFFSET_OUTPUT,
    Uid.OFFSET_LSE,
    Uid.OFFSET_GRAD_OUTPUT,
    Uid.OFFSET_GRAD_QUERY,
)
_SIDE_KV = (Uid.OFFSET_KEY, Uid.OFFSET_VALUE, Uid.OFFSET_GRAD_KEY, Uid.OFFSET_GRAD_VALUE)


def _token_strides(route: Route) -> dict[Uid, int]:
    """How many elements apart the tokens of each ragged operand lie."""
    spec = route.spec
    assert spec is not None
    found = {Uid.OFFSET_LSE: spec.heads_q}
    for uid, layout in (
        (Uid.OFFSET_QUERY, spec.query),
        (Uid.OFFSET_KEY, spec.key),
        (Uid.OFFSET_VALUE, spec.value),
        (Uid.OFFSET_OUTPUT, spec.output),
        (Uid.OFFSET_GRAD_OUTPUT, spec.grad_output),
        (Uid.OFFSET_GRAD_QUERY, spec.grad_query),
        (Uid.OFFSET_GRAD_KEY, spec.grad_key),
        (Uid.OFFSET_GRAD_VALUE, spec.grad_value),
    ):
        if layout is not None:
            found[uid] = layout.stride[2]
    return found


def _constant_operands(route: Route, given: Given) -> Operands:
    """What plans are told that no call of the signature changes."""
    assert route.spec is not None
    device = given.query.device
    operands: Operands = {}
    if route.spec.slopes:
        operands[Uid.SLOPES] = torch.tensor(paper_slopes(route.spec.heads_q), device=device)
    torch.cuda.current_stream(device).synchronize()  # calls on other streams read these
    return operands


def run(
    route: Route,
    given: Given,
    longest_q: int,
    longest_kv: int,
    gradient: bool,
    drawn: padded.Drawn | None = None,
) -> Result:
    """Output, and log-sum-exp where the options ask for it, by a route that has plans.

    Args:
        route: that of the call.
        given: the caller's tensors.
        longest_q, longest_kv: the longest sequences.
        gradient: autograd shall know of it.
        drawn: the dropout's seed; None draws one where there is dropout.
    """
    assert route.spec is not None
    inputs, sinks, operands = prepared(route, given, longest_q, longest_kv, drawn)
    shape = (given.query.shape[0], inputs.query.shape[1], inputs.value.shape[2])
    layout = TensorSpec(shape, contiguous_stride(shape), route.spec.query.dtype)
    output, lse = run_plans(inputs, sinks, layout, operands, route, gradient)
    if lse is not None and sinks is not None and route.options.return_lse:
        lse = _with_sinks_alone(lse, sinks, operands)
    return output[..., : route.outline.dim_v], lse if route.options.return_lse else None


def prepared(
    route: Route,
    given: Given,
    longest_q: int,
    longest_kv: int,
    drawn: padded.Drawn | None = None,
) -> tuple[Inputs, Tensor | None, Operands]:
    """Tensors that cuDNN can address, sinks in float32, and what else the plans are told."""
    assert route.spec is not None
    inputs = prepare(given, route.options, dense_query=route.spec.tokens_q is not None)
    runtime.keep_for_captures(route)
    operands = route.operands | sequences_of(route, given, longest_q, longest_kv)
    if given.slopes is not None:
        operands[Uid.SLOPES] = given.slopes.detach().float().contiguous()
    if route.options.dropout_p:
        seed, offset = attention.draw(given.query.device) if drawn is None else drawn
        operands[Uid.DROPOUT_SEED], operands[Uid.DROPOUT_OFFSET] = seed, offset
    sinks = None if given.sinks is None else given.sinks.float().contiguous()
    return inputs, sinks, operands


def _with_sinks_alone(lse: Tensor, sinks: Tensor, operands: Operands) -> Tensor:
    """The log-sum-exp ``(H, tokens)``: without keys the sink is all that is summed."""
    lengths_q, lengths_kv = operands[Uid.SEQ_LEN_Q], operands[Uid.SEQ_LEN_KV]
    starts = operands[Uid.OFFSET_LSE] // lse.shape[0]
    index = torch.arange(lse.shape[1], device=lse.device)
    own = (torch.searchsorted(starts, index, right=True) - 1).clamp(0, lengths_q.shape[0] - 1)
    alone = (lengths_kv[own] == 0) & (index - starts[own] < lengths_q[own])
    return torch.where(alone, sinks[:, None], lse)


def sequences_of(route: Route, given: Given, longest_q: int, longest_kv: int) -> Operands:
    """Lengths and offsets, of as many sequences as the plans are made for: more are empty."""
    assert route.spec is not None and given.starts_q is not None and given.starts_kv is not None
    batch = route.spec.batch
    strides = _token_strides(route)
    operands: Operands = {}
    for starts, lengths, longest, length_uid, uids in (
        (given.starts_q, given.lengths_q, longest_q, Uid.SEQ_LEN_Q, _SIDE_Q),
        (given.starts_kv, given.lengths_kv, longest_kv, Uid.SEQ_LEN_KV, _SIDE_KV),
    ):
        missing = batch + 1 - starts.shape[0]
        if missing:
            starts = torch.cat([starts, starts[-1:].expand(missing)])
        if lengths is not None and missing:
            lengths = torch.nn.functional.pad(lengths, (0, missing))
        operands[length_uid] = _own_lengths(starts, lengths, longest).to(torch.int32)
        wide = starts.to(torch.int64)
        by_stride = {strides[uid]: wide for uid in uids if uid in strides}
        by_stride = {stride: wide * stride for stride in by_stride}
        operands |= {uid: by_stride[strides[uid]] for uid in uids if uid in strides}
    return operands


def _fall_back(
    given: Given,
    longest_q: int,
    longest_kv: int,
    options: Options,
    terms: Terms,
    reasons: tuple[Reason, ...],
) -> Result:
    """The call by plain PyTorch, if that is allowed."""
    if given.query.numel():
        accept(given, options, reasons)
    output, lse = by_reference(given, longest_q, longest_kv, options, terms)
    return output, lse if options.return_lse else None


def by_reference(
    given: Given, longest_q: int, longest_kv: int, options: Options, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by plain PyTorch."""
    assert given.starts_q is not None and given.starts_kv is not None
    output, lse = reference_layouts.varlen(
        given.query,
        given.key,
        given.value,
        given.starts_q,
        given.starts_kv,
        dropout_p=options.dropout_p,
        scale=options.scale,
        bottom_right=terms.bottom_right,
        window=terms.window,
        softcap=terms.softcap or None,
        alibi_slopes=slopes_of(given, terms),
        sinks=given.sinks,
        seq_lens_q=_own_lengths(given.starts_q, given.lengths_q, longest_q),
        seq_lens_kv=_own_lengths(given.starts_kv, given.lengths_kv, longest_kv),
        max_seqlen_q=longest_q,
        max_seqlen_kv=longest_kv,
    )
    return output, lse.float()
