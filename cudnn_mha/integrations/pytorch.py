"""PyTorch's FLASH backend on this package's plans, through PyTorch's own registry.

::

    from cudnn_mha.integrations import pytorch
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    pytorch.register()  # changes nothing yet
    activate_flash_attention_impl("cudnn_mha")
    restore_flash_attention_impl()

In between, whatever PyTorch gives to its FLASH backend is computed by cuDNN: calls of
``F.scaled_dot_product_attention`` for which it chose that backend, ``varlen_attn`` whatever it
chose, and direct calls of the operators in `SCHEMAS`, on CUDA, in the whole process. The rest stays
PyTorch's: its choice, the autograd formula, the shapes that compilers see. What is returned is laid
out as PyTorch's kernels return it: log-sum-exp ``(B, H, S)``, packed ``(H, tokens)``, float32; the
random state, which nobody reads without dropout, ``(2,)`` and ``()`` uint64; an empty debug mask.

A call that is not served goes to the kernel that was there before, is counted (`status`), and is
explained once by the logger ``cudnn_mha``. Among these are dropout, whose weights PyTorch's
backward could not drop again, debug masks, ALiBi, pages and ``num_splits``, with which callers ask
for results that do not depend on the batch. Forward and backward decide on their own: both leave
and take the same output and log-sum-exp as PyTorch's kernels, so each may be served alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # defines the operators of varlen_attn
from torch import Tensor
from torch.library import Library
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl

from cudnn_mha import config, kernels, packed, packed_kernels
from cudnn_mha.backend import Tally, replacing
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.dispatch import log_fallback
from cudnn_mha.inputs import Options
from cudnn_mha.kernels import Arguments, NotServed
from cudnn_mha.routes import Given
from cudnn_mha.terms import Terms, make_terms

__all__ = ["NAME", "FlashStatus", "register", "status"]

logger = logging.getLogger("cudnn_mha")

NAME = "cudnn_mha"
"""What ``activate_flash_attention_impl`` calls it."""

_KEY = "CUDA"

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class FlashStatus:
    """The state in force, and what was done since the start.

    Attributes:
        active: PyTorch's FLASH backend is served by this package.
        served: forward calls served from our plans.
        served_backward: backward calls likewise.
        fallbacks: calls of either kind given to the kernels that were there before.
        reasons: how often each rule was a reason for that.
    """

    active: bool
    served: int
    served_backward: int
    fallbacks: int
    reasons: dict[str, int]

    def __str__(self) -> str:
        lines = [
            f"PyTorch's FLASH backend is {'' if self.active else 'not '}served by {NAME}",
            f"  served: {self.served} forward, {self.served_backward} backward",
            f"  given back: {self.fallbacks}",
        ]
        lines += [f"    {rule}: {count}" for rule, count in sorted(self.reasons.items())]
        return "\n".join(lines)


def register() -> None:
    """Makes ``"cudnn_mha"`` known to ``torch.nn.attention.activate_flash_attention_impl``.

    Nothing is computed differently until that is called.
    """
    register_flash_attention_impl(NAME, register_fn=_activate)


def status() -> FlashStatus:
    """The state in force, and what was done."""
    with _tally.lock:
        return FlashStatus(
            active=current_flash_attention_impl() == NAME,
            served=_tally.forward.value,
            served_backward=_tally.backward.value,
            fallbacks=_tally.fallbacks.value,
            reasons=dict(_tally.reasons),
        )


_tally = Tally()


class _Handle:
    """What the registry keeps while we are active."""

    def __init__(self, libraries: list[Library]) -> None:
        self._libraries = libraries

    def remove(self) -> None:
        """Puts the kernels back that were there before."""
        for library in self._libraries:
            library._destroy()
        self._libraries = []


def _activate() -> _Handle | None:
    """Replaces the kernels; called by the registry.

    Raises:
        RuntimeError: this PyTorch's operators are not the ones that this package knows.
    """
    if config.settings().disabled:
        logger.warning("%s=1 is set: PyTorch's FLASH backend stays as it is", config.DISABLED)
        return None
    ours = []
    for name, serve, query, backward in _KERNELS:
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is None and name in _LATER:
            continue
        found = None if packet is None else str(packet.default._schema).removeprefix(name)
        if found not in SCHEMAS[name]:
            raise RuntimeError(
                f"{name} of torch {torch.__version__} is not one that cudnn_mha knows: it is "
                f"{found}; use a version of cudnn_mha that is made for it"
            )
        before = torch.library.get_kernel(name, _KEY)
        kernel = _kernel(serve, before.call_boxed, query, backward)
        ours.append((namespace, operator, kernel))
    libraries = {namespace: Library(namespace, "IMPL") for namespace, *_ in ours}
    with replacing():
        for namespace, operator, kernel in ours:
            library = libraries[namespace]
            library.impl(operator, kernel, _KEY, with_keyset=True, allow_override=True)
    return _Handle(list(libraries.values()))


class _Before(threading.local):
    """Whether this thread is in a kernel that was there before, which may call others of them."""

    running = False


_before = _Before()


def _kernel(
    serve: Callable[..., Any],
    before: Callable[..., Any],
    query: int,
    backward: bool,
) -> Callable[..., Any]:
    """The kernel of an operator: ours where cuDNN serves the call, else the one from before.

    Args:
        serve: computes the call or raises NotServed.
        before: the kernel from before; takes the dispatch keys first.
        query: which argument the query is; key and value follow it.
        backward: it is counted as a backward.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = not _before.running
        if outermost:
            try:
                result = serve(*args, **kwargs)
            except NotServed as error:
                reasons = error.reasons
            except torch.OutOfMemoryError as error:
                message = f"not enough memory for cuDNN: {error}"
                reasons = (Reason("memory", message, Kind.UNAVAILABLE),)
            else:
                (_tally.backward if backward else _tally.forward).add()
                return result
            _tally.give_back(reasons)
            log_fallback(kernels.describe(*args[query : query + 3]), reasons)
        _before.running = True
        try:
            return before(keys, *args, **kwargs)
        finally:
            _before.running = not outermost

    return kernel


# ---------------------------------------------------------------------------------------- forward


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _require_plain(dropout_p, return_debug_mask)
    output, lse = _dense_forward(query, key, value, is_causal, scale)
    rest = _unread(query)
    return output, lse, None, None, query.shape[2], key.shape[2], *rest


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Outputs:
    _require_plain(
        dropout_p,
        return_debug_mask,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        num_splits=num_splits,
    )
    window = _window(window_size_left, window_size_right)
    if cum_seq_q is None:
        is_causal = _causal_alone(is_causal, window, seqused_k)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        output, lse = _dense_forward(query, key, value, is_causal, scale)
        return output.transpose(1, 2), lse, *_unread(query)
    if cum_seq_k is None:
        raise NotServed((Reason("cum_seq_k", "keys that are not packed are left to PyTorch"),))
    gradient = _gradient(query, key, value)
    given, terms = _packed(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window, scale, seqused_k
    )
    options = _options(scale, gradient)
    output, lse = packed_kernels.forward(given, max_q, max_k, options, terms, gradient)
    return _laid_out(output, query), lse.contiguous(), *_unread(query)


def _flash_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    output, lse, *_ = _flash_forward(*args, **kwargs)
    out.copy_(output)
    return lse


def _varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    del enable_gqa  # the numbers of heads say it
    left, right = window_size or (-1, -1)
    output, lse, *_ = _flash_forward(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,
        is_causal,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
    )
    return output, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


def _dense_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output ``(B, H, S, D)`` in the layout of query, and log-sum-exp ``(B, H, S)``."""
    gradient = _gradient(query, key, value)
    arguments = _arguments(query, key, value, is_causal, scale, gradient)
    output, lse = kernels.forward(query, key, value, None, arguments, gradient, aten=True)
    assert lse is not None
    return output, lse.squeeze(-1)


# --------------------------------------------------------------------------------------- backward


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> Gradients:
    del cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset
    _require_plain(dropout_p)
    return _dense_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    del rng_state, unused
    _require_plain(dropout_p)
    window = _window(window_size_left, window_size_right)
    if cum_seq_q is None or cum_seq_k is None:
        is_causal = _causal_alone(is_causal, window, None)
        grad_out, query, key, value, out = (
            t.transpose(1, 2) for t in (grad_out, query, key, value, out)
        )
        found = _dense_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale)
        return found[0].transpose(1, 2), found[1].transpose(1, 2), found[2].transpose(1, 2)
    given, terms = _packed(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window, scale, None
    )
    options = _options(scale, True)
    grads = packed_kernels.backward(grad_out, given, out, logsumexp, max_q, max_k, options, terms)
    return _laid_out(grads.query, query), _laid_out(grads.key, key), _laid_out(grads.value, value)


def _varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> Gradients:
    left, right = window_size or (-1, -1)
    return _flash_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,
        is_causal,
        rng_state,
        None,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


def _dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Gradients:
    arguments = _arguments(query, key, value, is_causal, scale, True)
    found = kernels.backward(
        grad_out, query, key, value, out, lse.unsqueeze(-1), None, arguments, aten=True
    )
    return found.query, found.key, found.value


# -------------------------------------------------------------------------------- what is served


def _require_plain(dropout_p: float, return_debug_mask: bool = False, **others: object) -> None:
    """Raises NotServed for what is left to the kernels from before, naming all of it."""
    reasons = []
    if dropout_p:
        message = f"dropout ({dropout_p}) is left to PyTorch, whose random state has another form"
        reasons.append(Reason("flash_dropout", message))
    if return_debug_mask:
        reasons.append(Reason("debug_mask", "cuDNN returns no debug mask"))
    for name, value in others.items():
        if value is not None:
            reasons.append(Reason(name, f"{name} is left to PyTorch's kernel"))
    if reasons:
        raise NotServed(tuple(reasons))


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    """The bounds, -1 for none, as FlashAttention's kernels read them."""
    return (-1 if left is None else max(left, -1), -1 if right is None else max(right, -1))


def _causal_alone(is_causal: bool, window: tuple[int, int], seqused_k: Tensor | None) -> bool:
    """Whether a dense call is causal; raises NotServed where it asks for more than that."""
    if seqused_k is not None:
        raise NotServed((Reason("seqused_k", "dense calls with seqused_k are left to PyTorch"),))
    if window == (-1, 0):
        return True
    if window != (-1, -1) and not (is_causal and window[0] == -1):
        raise NotServed((Reason("dense_window", "dense calls with windows are left to PyTorch"),))
    return is_causal


def _gradient(*tensors: Tensor) -> bool:
    """Whether autograd says that it will want the backward.

    Compiled code and `varlen_attn` do not say so; their backward finds its own plan.
    """
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, gradient: bool
) -> Arguments:
    """The arguments of a dense call, for which PyTorch's causal diagonal ends in the last key."""
    if query.dim() != 4 or key.dim() != 4 or value.shape[-1] != query.shape[-1]:
        message = "flash attention takes (B, H, S, D), of one head dimension"
        raise NotServed((Reason("arguments", message),))
    if is_causal and query.shape[2] != key.shape[2]:
        is_causal = query.shape[2] != 1  # the last query sees all keys
        if is_causal:
            message = "the diagonal of dense calls with fewer keys or queries is left to PyTorch"
            raise NotServed((Reason("bottom_right", message),))
    deterministic = gradient and torch._C._get_deterministic_algorithms()
    return Arguments(0.0, is_causal, scale, deterministic, return_lse=True)


def _options(scale: float | None, gradient: bool) -> Options:
    """The options of a packed call."""
    return Options(
        scale=scale,
        enable_gqa=True,
        return_lse=True,
        deterministic=gradient and torch._C._get_deterministic_algorithms(),
        workspace_limit=config.settings().workspace_limit,
    )


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window: tuple[int, int],
    scale: float | None,
    seqused_k: Tensor | None,
) -> tuple[Given, Terms]:
    """A packed call; raises NotServed where it means nothing."""
    if query.shape[-1] != value.shape[-1]:
        raise NotServed((Reason("arguments", "flash attention takes one head dimension"),))
    # With the same sequences on both sides the two corners of each diagonal are one.
    same = cum_seq_q.data_ptr() == cum_seq_k.data_ptr() and cum_seq_q.shape == cum_seq_k.shape
    square = same and max_q == max_k and seqused_k is None
    terms = make_terms(is_causal, "top_left" if square else "bottom_right", window, None, False)
    given = Given(
        query,
        key,
        value,
        lengths_kv=seqused_k,
        starts_q=cum_seq_q,
        starts_kv=cum_seq_k,
    )
    try:
        packed.validate(given, max_q, max_k, Options(scale=scale))
    except (ValueError, TypeError, RuntimeError) as error:
        raise NotServed((Reason("arguments", str(error)),)) from error
    return given, terms


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """The result in the layout of ``empty_like(like)``, which is what compilers were told."""
    wanted = torch.empty_like(like)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


def _unread(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Random state, unused and debug mask, fresh for each call, as CUDA graphs want them."""
    state, unused = (
        torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())
    )
    return state, unused, query.new_empty(0)


# -------------------------------------------------------------------------------------- operators

_ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
    "SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, "
    "Tensor? alibi_slopes=None{more})"
)
_PAGED = ", Tensor? block_table=None, int? num_splits=None"
_FORWARD_RESULT = (
    " -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)"
)
_PACKED = (
    "Tensor query, Tensor key, Tensor value, {more}Tensor cu_seq_q, Tensor{optional} cu_seq_k, "
    "SymInt max_q, SymInt max_k, "
)
_VARLEN = "bool is_causal=False, float? scale=None, SymInt[]? window_size=None"
_VARLEN_PAGED = (
    ", bool enable_gqa=False, Tensor? seqused_k=None, Tensor? block_table=None, "
    "SymInt? num_splits=None"
)
_THREE = " -> (Tensor, Tensor, Tensor)"

SCHEMAS: dict[str, tuple[str, ...]] = {
    "aten::_scaled_dot_product_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, "
        "Tensor unused, Tensor debug_attn_mask)",
    ),
    "aten::_scaled_dot_product_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    ),
    "aten::_flash_attention_forward": tuple(
        _ARGUMENTS.format(more=more) + _FORWARD_RESULT for more in ("", _PAGED)
    ),
    "aten::_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, "
        "SymInt? window_size_left=None, SymInt? window_size_right=None)" + _THREE,
    ),
    "aten::_flash_attention_forward_no_dropout_inplace": (
        "(Tensor(a!) out, " + _ARGUMENTS.format(more=_PAGED)[1:] + " -> Tensor softmax_logsumexp",
    ),
    "torch_attn::_varlen_attn": (
        f"({_PACKED.format(more='', optional='')}{_VARLEN}){_THREE}",
        f"({_PACKED.format(more='', optional='?')}{_VARLEN}{_VARLEN_PAGED}){_THREE}",
    ),
    "torch_attn::_varlen_attn_backward": (
        f"(Tensor grad_out, {_PACKED.format(more='Tensor out, Tensor lse, ', optional='')}"
        f"bool is_causal, Tensor rng_state, float? scale=None, SymInt[]? window_size=None){_THREE}",
    ),
}
"""The operators as this module serves them, in the PyTorch versions that it knows."""

_LATER = ("aten::_flash_attention_forward_no_dropout_inplace",)
"""Operators that the oldest PyTorch does not have."""


_KERNELS: tuple[tuple[str, Callable[..., Any], int, bool], ...] = (
    ("aten::_scaled_dot_product_flash_attention", _sdpa_forward, 0, False),
    ("aten::_scaled_dot_product_flash_attention_backward", _sdpa_backward, 1, True),
    ("aten::_flash_attention_forward", _flash_forward, 0, False),
    ("aten::_flash_attention_backward", _flash_backward, 1, True),
    ("aten::_flash_attention_forward_no_dropout_inplace", _flash_forward_into, 1, False),
    ("torch_attn::_varlen_attn", _varlen_forward, 0, False),
    ("torch_attn::_varlen_attn_backward", _varlen_backward, 1, True),
)
"""Each operator, what serves it, which of its arguments the query is, and whether it goes back."""
