"""Attention to keys and values that lie in pages, as serving engines keep them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import dispatch, reference_layouts, runtime
from cudnn_mha.checks import ALIGNMENT, Kind, Reason
from cudnn_mha.devices import Device
from cudnn_mha.execution import apply_sinks, run_plans, with_sinks_alone
from cudnn_mha.graph_builder import Uid
from cudnn_mha.inputs import (
    Inputs,
    Options,
    addressable_copy,
    layout_of,
    require_alike,
    require_local,
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
    settle,
    slopes_of,
    validate_operands,
    with_sinks,
)
from cudnn_mha.sequences import Operands, require_lengths, require_pages
from cudnn_mha.spec import AttentionSpec, Direction, TensorSpec, contiguous_stride, layout_like
from cudnn_mha.terms import Terms, paper_slopes

LAYOUTS = ("HND", "NHD")

NO_GRADIENT = "attention to pages has no gradient; call it under torch.no_grad()"

_routes: dispatch.Decisions[Route] = dispatch.Decisions()


def compute(
    given: Given, table: Tensor, layout: str, options: Options, terms: Terms
) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa_paged` on these terms; see `checked`.

    Raises:
        CudnnSdpaUnsupportedError: no fallback is allowed, and cuDNN does not serve the call.
        ValueError, TypeError, RuntimeError: tensors that do not fit; the message names them.
    """
    given = checked(given, table, layout, options)
    terms = dataclasses.replace(terms, alibi=terms.alibi or given.slopes is not None)
    output, lse = attend(given, table, options, terms)
    return output if lse is None else (output, lse)


def checked(given: Given, table: Tensor, layout: str, options: Options) -> Given:
    """The tensors of a call, pages with their heads first.

    Args:
        given: the caller's tensors.
        table: the pages of each sequence.
        layout: where pages have their heads, one of `LAYOUTS`.
        options: the caller's other arguments.

    Raises:
        ValueError, TypeError, RuntimeError: tensors that do not fit; the message names them.
    """
    require_tensors(*given[:3], None)
    operands = {
        "block_table": table,
        "seq_lens_kv": given.lengths_kv,
        "seq_lens_q": given.lengths_q,
        "alibi_slopes": given.slopes,
        "sinks": given.sinks,
    }
    for name, operand in operands.items():
        optional = name not in ("block_table", "seq_lens_kv")
        if not isinstance(operand, Tensor) and not (optional and operand is None):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(operand).__name__}")
    require_local((*given[:3], *operands.values()))
    key, value = heads_first(given.key, given.value, layout)
    given = given._replace(key=key, value=value)
    validate(given, table, options)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        raise RuntimeError(NO_GRADIENT)
    return given


def heads_first(key: Tensor, value: Tensor, page_layout: str) -> tuple[Tensor, Tensor]:
    """Pages as ``(pages, H, page size, D)``.

    Raises:
        ValueError: there is no such layout; names those there are.
    """
    if page_layout not in LAYOUTS:
        raise ValueError(f"page_layout must be one of {', '.join(LAYOUTS)}, got {page_layout!r}")
    if page_layout == "NHD" and key.dim() == value.dim() == 4:
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    return key, value


def validate(given: Given, table: Tensor, options: Options) -> None:
    """Raises for what means nothing; the message names the argument."""
    query, key, value = given[:3]
    validate_numbers(options)
    tensors = {"query": query, "key_pages": key, "value_pages": value}
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {tuple(tensor.shape)}")
    require_alike(tensors, "; page_layout says where the heads are")
    if key.shape[0] != value.shape[0] or key.shape[2] != value.shape[2]:
        raise ValueError(
            "key_pages and value_pages must be as many and of one page size, got "
            f"{key.shape[0]} of {key.shape[2]} and {value.shape[0]} of {value.shape[2]}"
        )
    if 0 in (key.shape[0], key.shape[2]):
        raise ValueError(
            "key_pages must hold at least one page of one slot, got "
            f"{key.shape[0]} of {key.shape[2]}"
        )
    batch = query.shape[0]
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(
            f"block_table must be of shape (B, M) with B = {batch}, got {tuple(table.shape)}"
        )
    require_fit("block_table", table, tuple(table.shape), query, whole=True)
    assert given.lengths_kv is not None
    validate_operands(given, batch, query.shape[1])
    room = table.shape[1] * key.shape[2]
    require_lengths("seq_lens_kv", given.lengths_kv, room, "what its pages hold")
    require_pages("block_table", table, given.lengths_kv, key.shape[2], key.shape[0])
    if given.lengths_q is not None:
        require_lengths("seq_lens_q", given.lengths_q, query.shape[2], "the rows of query")


def attend(given: Given, table: Tensor, options: Options, terms: Terms) -> Result:
    def fall_back(*reasons: Reason) -> Result:
        return _fall_back(given, table, options, terms, reasons)

    tensors = [t for t in (*given, table) if t is not None]
    if not dispatch.plain(*tensors):
        return fall_back(dispatch.not_for_cudnn(given.query))
    if 0 in (*given.query.shape, *given.key.shape, *given.value.shape, *table.shape):
        return fall_back(Reason("empty", "there is nothing for cuDNN to compute"))
    route = decided(
        _routes,
        _signature(given, table, options, terms),
        lambda: describe(given, table, options, terms),
        lambda route: _constant_operands(route, given),
    )
    return follow(route, lambda: _run(route, given, table), fall_back)


def _signature(given: Given, table: Tensor, options: Options, terms: Terms) -> tuple[Any, ...]:
    tensors = tuple(
        (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % ALIGNMENT) for t in given[:3]
    )
    rest = tuple(None if t is None else (t.dtype, t.get_device()) for t in given[3:])
    return (
        tensors,
        rest,
        table.shape,
        table.dtype,
        table.get_device(),
        options,
        terms,
        torch._C._get_cudnn_sdp_enabled(),
    )


def describe(
    given: Given, table: Tensor, options: Options, terms: Terms, device: Device | None = None
) -> Route:
    """How a valid call would be computed, without its plans; see `padded.describe`."""
    route, reasons, device = begin(given, options, terms, device)
    if device is None:
        return route
    route.manner = Manner.CACHE
    query = layout_of(addressable_copy(given.query))
    key, value = layout_of(given.key), layout_of(given.value)
    for name, tensor in (("key_pages", given.key), ("value_pages", given.value)):
        if tensor.data_ptr() % ALIGNMENT:
            message = f"{name} must start at a multiple of {ALIGNMENT} bytes; it is not copied"
            reasons.append(Reason("misaligned", message, Kind.WRONG))
    batch, pages = table.shape
    shape = (batch, 1, pages, 1)
    spec = AttentionSpec(
        Direction.FORWARD,
        query,
        key,
        value,
        layout_like((*query.shape[:3], value.shape[3]), query),
        scale=route.outline.scale,
        lse=options.return_lse,
        lengths=True,
        page_table=TensorSpec(shape, contiguous_stride(shape), "int32"),
    )
    terms = terms.within(spec.seq_q, spec.seq_kv, lengths=True)
    route.terms = terms
    spec = terms.applied(spec, slopes=given.slopes is not None)
    spec = with_sinks(route, spec, given, gradient=False)
    settle(route, [spec], lambda spec: spec, reasons)
    return route


def _constant_operands(route: Route, given: Given) -> Operands:
    """What plans are told that no call of the signature changes."""
    assert route.spec is not None
    spec, device = route.spec, given.query.device
    length = torch.full((spec.batch,), spec.seq_q, dtype=torch.int32, device=device)
    operands: Operands = {Uid.SEQ_LEN_Q: length}
    if spec.slopes:
        operands[Uid.SLOPES] = torch.tensor(paper_slopes(spec.heads_q), device=device)
    torch.cuda.current_stream(device).synchronize()  # calls on other streams read these
    return operands


def _run(route: Route, given: Given, table: Tensor) -> Result:
    assert route.spec is not None and given.lengths_kv is not None
    spec = route.spec
    query = addressable_copy(sign_moved(given.query, route.options.scale))
    runtime.keep_for_captures(route)
    operands = dict(route.operands)
    # Whatever stands behind the last page in use must not lead out of the pool.
    pages = table.clamp(0, given.key.shape[0] - 1).to(torch.int32).contiguous()
    operands[Uid.PAGE_TABLE_KEY] = operands[Uid.PAGE_TABLE_VALUE] = pages
    if given.slopes is not None:
        operands[Uid.SLOPES] = given.slopes.detach().float().contiguous()
    lengths_kv = given.lengths_kv.clamp(0, spec.seq_kv).to(torch.int32)
    lengths_q = operands[Uid.SEQ_LEN_Q]
    if given.lengths_q is not None:
        lengths_q = given.lengths_q.clamp(0, spec.seq_q).to(torch.int32)
    # Kernels skip a sequence of length 0 and leave its rows as they were.
    empty = (lengths_q == 0) | (lengths_kv == 0)
    operands[Uid.SEQ_LEN_Q] = lengths_q.masked_fill(empty, 1)
    operands[Uid.SEQ_LEN_KV] = lengths_kv.masked_fill(empty, 1)
    index = torch.arange(spec.seq_q, device=query.device)
    hidden = ((index >= lengths_q[:, None]) | empty[:, None])[:, None, :, None]
    sinks = None if given.sinks is None else given.sinks.float().contiguous()
    inputs = Inputs(query, given.key, given.value, None, None)
    output, lse = run_plans(inputs, sinks, spec.output, operands, route, False)
    output = output.masked_fill(hidden, 0)
    if lse is not None:
        lse = lse.masked_fill(hidden[..., 0], -torch.inf)
        if route.sinks_after and sinks is not None:
            output, lse = apply_sinks(output, lse, sinks, given.lengths_q)
        elif sinks is not None:
            lse = with_sinks_alone(lse, sinks, lengths_q, lengths_kv)
    return output, lse if route.options.return_lse else None


def _fall_back(
    given: Given, table: Tensor, options: Options, terms: Terms, reasons: tuple[Reason, ...]
) -> Result:
    """The call by plain PyTorch, if that is allowed."""
    if given.query.numel():
        accept(given, options, reasons)
    output, lse = by_reference(given, table, options, terms)
    return output, lse if options.return_lse else None


def by_reference(
    given: Given, table: Tensor, options: Options, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by plain PyTorch."""
    assert given.lengths_kv is not None
    lengths_q, seq_kv = given.lengths_q, table.shape[1] * given.key.shape[2]
    output, lse = reference_layouts.paged(
        given.query,
        given.key,
        given.value,
        table.clamp(0, max(given.key.shape[0] - 1, 0)),
        given.lengths_kv.clamp(0, seq_kv),
        seq_lens_q=None if lengths_q is None else lengths_q.clamp(0, given.query.shape[2]),
        scale=options.scale,
        bottom_right=terms.bottom_right,
        window=terms.window,
        softcap=terms.softcap or None,
        alibi_slopes=slopes_of(given, terms),
        sinks=given.sinks,
    )
    return output, lse.float()
