"""Zeros for the rows of padding, which ragged kernels leave as they were."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

LARGE = 2**24
"""Bytes from which on it is cheaper to look for the padding than to write zeros everywhere."""

ROWS = 32


def zero_padding(tensor: Tensor, real: Tensor | None) -> Tensor:
    """An uninitialized tensor with zeros where no kernel will write.

    Args:
        tensor: ``(B, H, S, D)``; the stride of D is 1.
        real: ``(B, S)`` bool, the rows that a kernel writes; None if unknown.
    """
    kernel = None if real is None or tensor.nbytes < LARGE else _kernel()
    if kernel is None or real is None:
        return tensor.zero_()
    batch, heads, seq, dim = tensor.shape
    width = 1 << (dim - 1).bit_length()
    with torch.cuda.device(tensor.device):
        kernel[(-(-seq // ROWS), heads, batch)](
            tensor, real, seq, dim, *tensor.stride()[:3], real.stride(0), ROWS=ROWS, DIM=width
        )
    return tensor


@functools.cache
def _kernel() -> Any:
    """The kernel that looks for padding, or None where PyTorch comes without Triton."""
    try:
        return importlib.import_module("cudnn_mha.padding_kernel").zero_rows
    except ImportError:
        return None
