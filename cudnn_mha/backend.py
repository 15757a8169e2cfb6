"""On and off: PyTorch's own cuDNN attention served from this package's plans.

PyTorch chooses a backend for ``F.scaled_dot_product_attention`` and calls an operator of its own
for it. While enabled, the two operators of its cuDNN backend,
``aten::_scaled_dot_product_cudnn_attention`` and its backward, are ours on CUDA. Everything around
them stays PyTorch's: the choice, the autograd formula, the shapes that compilers see, tensor
subclasses. So what they take and return is what PyTorch's take and return:

* the output in PyTorch's layout, from PyTorch's own rule, asked once for each layout;
* log-sum-exp ``(B, H, S, 1)`` float32, undefined unless asked for; ``cum_seq_q``, ``cum_seq_k``
  and ``debug_attn_mask`` undefined;
* seed and offset 0-d int64 on the device, with or without dropout.

A call that cuDNN cannot serve from our plans goes to PyTorch's implementation, or to plain
PyTorch where the reason is that cuDNN computes it wrong.

PyTorch hands over a boolean mask as an additive one. Before 2.12 it fills that with a finite
number, -65504 (pytorch/pytorch#177868), so a row that masks everything comes as a row of nothing
but that number; it is taken for what it was.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend

from cudnn_mha import config, kernels, runtime
from cudnn_mha.attention import draw
from cudnn_mha.cache import Counter
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.dispatch import log_fallback
from cudnn_mha.kernels import Arguments

logger = logging.getLogger("cudnn_mha")

FORWARD = "_scaled_dot_product_cudnn_attention"
BACKWARD = "_scaled_dot_product_cudnn_attention_backward"

SCHEMAS = {
    FORWARD: (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
        "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, "
        "Tensor debug_attn_mask)"
    ),
    BACKWARD: (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, "
        "float? scale=None) -> (Tensor, Tensor, Tensor)"
    ),
}
"""The operators as this module serves them; another PyTorch may have others."""

_MASKED = {
    dtype: torch.tensor(-65504.0, dtype=dtype).item() for dtype in (torch.float16, torch.bfloat16)
}
"""What PyTorch writes for False in a boolean mask, where that is finite."""

if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12):
    _MASKED.clear()

OURS = "cudnn_mha"
PYTORCHS = "PyTorch"

_FORWARD_RESULT = tuple[Tensor, Tensor | None, None, None, int, int, Tensor, Tensor, None]


@dataclass(frozen=True)
class Status:
    """The state in force, and what was done since the start.

    Attributes:
        enabled: PyTorch's cuDNN attention is served by this package.
        why: what switched it on, or keeps it off.
        provider: who serves it now: ``'cudnn_mha'``, ``'PyTorch'``, or where another package
            registered its own.
        priority: PyTorch's order of preference of its backends.
        served: forward calls served from our plans.
        served_backward: backward calls likewise.
        fallbacks: calls of either kind given to PyTorch's implementation or plain PyTorch.
        reasons: how often each rule was a reason for that.
    """

    enabled: bool
    why: str
    provider: str
    priority: tuple[str, ...]
    served: int
    served_backward: int
    fallbacks: int
    reasons: dict[str, int]

    def __str__(self) -> str:
        lines = [
            f"{'enabled' if self.enabled else 'not enabled'}: {self.why}",
            f"  PyTorch's cuDNN attention is served by {self.provider}",
            f"  order of preference: {', '.join(self.priority)}",
            f"  served: {self.served} forward, {self.served_backward} backward",
            f"  given back: {self.fallbacks}",
        ]
        lines += [f"    {rule}: {count}" for rule, count in sorted(self.reasons.items())]
        return "\n".join(lines)


class Tally:
    """What was served, and what was given back for which reasons, for the whole process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.forward = Counter()
        self.backward = Counter()
        self.fallbacks = Counter()
        self.reasons: collections.Counter[str] = collections.Counter()

    def give_back(self, reasons: tuple[Reason, ...]) -> None:
        """Counts a call that is not served."""
        self.fallbacks.add()
        with self.lock:
            self.reasons.update(reason.rule for reason in reasons)


class _State(Tally):
    """What is switched as well."""

    def __init__(self) -> None:
        super().__init__()
        self.library: Library | None = None
        self.why = "nobody asked for it"
        self.order: list[int] | None = None
        self.own_order: list[int] | None = None


_state = _State()


def enable(*, prefer: bool = True) -> None:
    """Serves PyTorch's cuDNN attention from this package's plans, in the whole process.

    Nothing happens where it is enabled already, or where ``TORCH_CUDNN_MHA_DISABLED=1`` is set.
    Where ``torch.distributed.tensor`` is loaded, `DTensor` is told how that attention may be
    sharded (`cudnn_mha.integrations.distributed`), and keeps to it when this is disabled.

    Args:
        prefer: also make cuDNN the first of PyTorch's attention backends; the others stay.

    Raises:
        RuntimeError: this PyTorch's operators are not the ones that this package knows.
    """
    if not _enable("enable() was called", prefer=prefer):
        logger.warning("cudnn_mha stays off: %s", _state.why)


def enable_from_environment() -> None:
    """What ``TORCH_CUDNN_MHA_ENABLED`` asks for."""
    try:
        if config.settings().enabled:
            _enable(f"{config.ENABLED} is set", prefer=True)
    except Exception as error:
        _state.why = str(error)
        raise


def disable() -> None:
    """Puts PyTorch's own kernels, and its order of preference, back."""
    with _state.lock:
        if _state.library is None:
            return
        _state.library._destroy()
        _state.library = None
        _state.why = "disable() was called"
        if _state.order is not None and _order() == _state.own_order:
            torch._C._set_sdp_priority_order(_state.order)
        _state.order = _state.own_order = None


@contextlib.contextmanager
def enabled(*, prefer: bool = True) -> Iterator[None]:
    """`enable` for the length of a ``with`` block; leaves it as it was found."""
    before = _state.library is not None
    enable(prefer=prefer)
    try:
        yield
    finally:
        if not before:
            disable()


def status() -> Status:
    """The state in force, and why."""
    with _state.lock:
        return Status(
            enabled=_state.library is not None,
            why=_state.why,
            provider=provider(),
            priority=tuple(_name(number) for number in _order()),
            served=_state.forward.value,
            served_backward=_state.backward.value,
            fallbacks=_state.fallbacks.value,
            reasons=dict(_state.reasons),
        )


def provider() -> str:
    """Who serves PyTorch's cuDNN attention on CUDA now: see `Status`."""
    dump = torch._C._dispatch_dump(f"aten::{FORWARD}")
    match = re.search(r"^CUDA: registered at (.*?) ::", dump, re.MULTILINE)
    if match is None:
        return "nobody"
    where = match[1]
    if __file__ in where:
        return OURS
    return PYTORCHS if "/RegisterCUDA" in where else where


def _enable(why: str, *, prefer: bool) -> bool:
    """Whether it is enabled now."""
    with _state.lock:
        if _state.library is not None:
            return True
        if config.settings().disabled:
            _state.why = f"{config.DISABLED}=1 is set, which wins over everything else"
            return False
        _check_operators()
        other = provider()
        if other not in (PYTORCHS, OURS):
            logger.warning(
                "another package already serves PyTorch's cuDNN attention, registered at %s; "
                "cudnn_mha takes its place until it is disabled",
                other,
            )
        with replacing():
            library = Library("aten", "IMPL")
            for name, kernel in ((FORWARD, _forward), (BACKWARD, _backward)):
                library.impl(name, kernel, "CUDA", allow_override=True)
        _state.library = library
        _state.why = why
        rules = runtime.sharding_rules()
        if rules is not None:
            rules.register()
        if prefer:
            _state.order = _order()
            cudnn = SDPBackend.CUDNN_ATTENTION.value
            _state.own_order = [cudnn, *(n for n in _state.order if n != cudnn)]
            torch._C._set_sdp_priority_order(_state.own_order)
        return True


@contextlib.contextmanager
def replacing() -> Iterator[None]:
    """PyTorch warns of any kernel that replaces another; replacing is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        yield


def _check_operators() -> None:
    for name, known in SCHEMAS.items():
        found = str(getattr(torch.ops.aten, name).default._schema).removeprefix(f"aten::{name}")
        if found != known:
            raise RuntimeError(
                f"aten::{name} of torch {torch.__version__} is not the one that cudnn_mha knows: "
                f"it is {found}, expected {known}; use a version of cudnn_mha that is made for it"
            )


def _order() -> list[int]:
    return [int(number) for number in torch._C._get_sdp_priority_order()]


def _name(number: int) -> str:
    return next((b.name for b in SDPBackend.__members__.values() if b.value == number), str(number))


# ---------------------------------------------------------------------------------------- kernels


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,  # PyTorch's kernel ignores it as well
    *,
    scale: float | None = None,
) -> _FORWARD_RESULT:
    deterministic = compute_log_sumexp and torch._C._get_deterministic_algorithms()
    arguments = _arguments(dropout_p, is_causal, scale, deterministic)
    if attn_bias is not None:
        attn_bias = _with_masked_rows(attn_bias)
    seed = offset = None
    if dropout_p:
        seed, offset = draw(query.device)
    try:
        output, lse = kernels.forward(
            query,
            key,
            value,
            attn_bias,
            arguments,
            compute_log_sumexp,
            False,
            True,
            seed,
            offset,
        )
    except kernels.NotServed as error:
        if not _give_back(query, key, value, error.reasons):
            return torch.ops.aten._cudnn_attention_forward(  # type: ignore[no-any-return]
                query,
                key,
                value,
                attn_bias,
                None,
                None,
                query.shape[2],
                key.shape[2],
                compute_log_sumexp,
                dropout_p,
                is_causal,
                return_debug_mask,
                scale=scale,
            )
        output, lse = kernels.reference_forward(query, key, value, attn_bias, arguments, seed)
        lse = lse if compute_log_sumexp else None
    else:
        _state.forward.add()
    if seed is None or offset is None:
        seed = offset = _unread(query)
        if compute_log_sumexp and not torch.is_grad_enabled():
            # The forward of a compiled graph, whose CUDA graph wants all that it keeps as its own.
            seed, offset = torch.empty_like(seed), torch.empty_like(seed)
    return output, lse, None, None, query.shape[2], key.shape[2], seed, offset, None


def _with_masked_rows(bias: Tensor) -> Tensor:
    """The mask with -inf in rows that were False throughout when they were boolean."""
    masked = _MASKED.get(bias.dtype)
    if masked is None or 0 in bias.shape:
        return bias
    return bias.masked_fill(bias.amax(-1, keepdim=True) == masked, -math.inf)


def _arguments(
    dropout_p: float, is_causal: bool, scale: float | None, deterministic: bool
) -> Arguments:
    if dropout_p or deterministic or scale is not None:
        return Arguments(dropout_p, is_causal, scale, deterministic)
    return _CAUSAL if is_causal else _FULL


_FULL = Arguments()
_CAUSAL = Arguments(is_causal=True)

_scalars: dict[int, Tensor] = {}


def _unread(query: Tensor) -> Tensor:
    """A 0-d int64 tensor on the device of ``query``: the same for all calls, as nobody reads it."""
    index = query.get_device()
    found = _scalars.get(index)
    if found is not None:
        return found
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return query.new_empty((), dtype=torch.int64)

    def make() -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=query.device)

    _scalars[index] = runtime.outside_pools(make)
    return _scalars[index]


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch._C._get_deterministic_algorithms()
    arguments = _arguments(dropout_p, is_causal, scale, deterministic)
    if attn_bias is not None:
        attn_bias = _with_masked_rows(attn_bias)
    seed, offset = (philox_seed, philox_offset) if dropout_p else (None, None)
    call = (grad_out, query, key, value, out, logsumexp, attn_bias, arguments)
    try:
        gradients = kernels.backward(*call, False, True, seed, offset)
    except kernels.NotServed as error:
        if not _give_back(query, key, value, error.reasons):
            return torch.ops.aten._cudnn_attention_backward(  # type: ignore[no-any-return]
                grad_out,
                query,
                key,
                value,
                out,
                logsumexp,
                philox_seed,
                philox_offset,
                attn_bias,
                cum_seq_q,
                cum_seq_k,
                max_q,
                max_k,
                dropout_p,
                is_causal,
                scale=scale,
            )
        gradients = kernels.reference_backward(*call, seed)
    else:
        _state.backward.add()
    return gradients.query, gradients.key, gradients.value


def _give_back(query: Tensor, key: Tensor, value: Tensor, reasons: tuple[Reason, ...]) -> bool:
    """Counts and explains a call that is not served; whether cuDNN would compute it wrong."""
    _state.give_back(reasons)
    log_fallback(kernels.describe(query, key, value), reasons)
    return any(reason.kind is Kind.WRONG for reason in reasons)
