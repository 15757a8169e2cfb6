"""Gradients that come through the log-sum-exp, of which cuDNN's backward knows nothing.

The gradient of a row's scores is ``P * (dP - delta)`` with ``delta = sum(dO * O)``, and where the
log-sum-exp has a gradient dL too, ``P * (dP - (delta - dL))``. The kernel makes delta of O and dO.
So these are given a few columns more, whose products add up to -dL, and the value zeros there,
which leave dP as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from torch import Tensor

from cudnn_mha.checks import Reason
from cudnn_mha.spec import AttentionSpec, TensorSpec, contiguous_stride, layout_like

COLUMNS = 16
"""Columns that are added: kernels that bound their workspace want multiples of 16."""

_PIECES = 3
"""Numbers of 8 bits (bfloat16) that hold one of 24 (float32)."""


def widened(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` with room for the columns."""
    changed: dict[str, TensorSpec] = {}
    for name in ("value", "output", "grad_output", "grad_value"):
        layout = getattr(spec, name)
        if layout is not None:
            changed[name] = layout_like((*layout.shape[:3], layout.shape[3] + COLUMNS), layout)
    return dataclasses.replace(spec, **changed)  # type: ignore[arg-type]


def widen(
    spec: AttentionSpec,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor | None,
    grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, output and its gradient with the columns in them.

    Args:
        spec: what `widened` gave.
        value: ``(B, H, Skv, Dv)``, or packed ``(tokens, H, Dv)``.
        output, grad_output: likewise with Hq and Sq.
        lse, grad_lse: ``(B, Hq, Sq)``, or packed ``(tokens, Hq)``.
    """
    # A row without keys has no weights that a gradient could reach; what comes may be NaN.
    rest = -grad_lse.float().masked_fill(lse == -math.inf, 0)
    wide_value = _wide(value, spec.value)
    wide_output = _wide(output, spec.output)
    wide_gradient = _wide(output if grad_output is None else grad_output, spec.output)
    if grad_output is None:
        wide_gradient.zero_()
    dim = output.shape[-1]
    for column in range(dim, dim + _PIECES):
        piece = rest.to(output.dtype)
        wide_output[..., column] = 1
        wide_gradient[..., column] = piece
        rest = rest - piece.float()
    return wide_value, wide_output, wide_gradient


def _wide(tensor: Tensor, layout: TensorSpec) -> Tensor:
    """A copy with zeros behind its last dimension."""
    shape = (*tensor.shape[:-1], layout.shape[3])
    stride = layout.stride if tensor.dim() == 4 else contiguous_stride(shape)
    copy = tensor.new_empty_strided(shape, stride)
    dim = tensor.shape[-1]
    copy[..., :dim].copy_(tensor)
    copy[..., dim:].zero_()
    return copy


def no_gradient(reasons: Iterable[Reason]) -> RuntimeError:
    """The error where cuDNN has no backward of that width."""
    listed = "; ".join(map(str, reasons))
    return RuntimeError(
        f"cuDNN has no gradient of this log-sum-exp: {listed} (the head dimension of value is "
        f"{COLUMNS} more than yours for it). Detach the log-sum-exp, or compute this attention "
        "under torch.backends.cuda.enable_cudnn_sdp(False)"
    )
