"""Zeros for the rows that belong to no sequence, which ragged kernels leave as they were.

Kernels also leave out sequences without queries or without keys.
"""

from __future__ import annotations

import functools
import importlib
import logging
import subprocess
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

logger = logging.getLogger("cudnn_mha")

LARGE = 2**24
"""Bytes from which on it is cheaper to look for such rows than to write zeros everywhere."""

ROWS = 32


def zero_padding(tensor: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """An uninitialized tensor with zeros behind the ends of its sequences.

    Args:
        tensor: ``(B, H, S, D)``; the stride of D is 1.
        own: ``(B,)`` int32, the lengths of the sequences.
        other: likewise on the side that is attended to, or attends.
    """

    def launch(kernels: ModuleType) -> None:
        batch, heads, seq, dim = tensor.shape
        width = 1 << (dim - 1).bit_length()
        kernels.zero_padding[(-(-seq // ROWS), heads, batch)](
            tensor, own, other, seq, dim, *tensor.stride()[:3], ROWS=ROWS, DIM=width
        )

    return _by_kernel(tensor, launch)


def zero_gaps(tensor: Tensor, offsets: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """An uninitialized packed tensor with zeros between, before and behind its sequences.

    Args:
        tensor: ``(tokens, H, D)``, contiguous.
        offsets: ``(B + 1,)`` int64, where sequences start, in elements; they ascend.
        own, other: as for `zero_padding`.
    """

    def launch(kernels: ModuleType) -> None:
        tokens, heads, dim = tensor.shape
        size, count = heads * dim, own.shape[0]
        kernels.zero_gaps[(-(-tokens // ROWS),)](
            tensor,
            offsets,
            own,
            other,
            count,
            tokens,
            size,
            STEPS=count.bit_length(),
            ROWS=ROWS,
            COLUMNS=min(1 << (size - 1).bit_length(), 256),
        )

    return _by_kernel(tensor, launch)


def _by_kernel(tensor: Tensor, launch: Callable[[ModuleType], None]) -> Tensor:
    """The tensor with zeros where the kernel writes them, or all zeros where there is none."""
    kernels = _kernels() if tensor.is_cuda and tensor.nbytes >= LARGE else None
    if kernels is None or _failed:
        return tensor.zero_()
    try:
        with torch.cuda.device(tensor.device):
            launch(kernels)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        # Triton builds its launcher with a C compiler, which a small image does not have.
        _failed.append(str(error))
        logger.warning("padding is made zero without Triton, which takes longer: %s", error)
        return tensor.zero_()
    return tensor


_failed: list[str] = []


@functools.cache
def _kernels() -> ModuleType | None:
    """The kernels that look for such rows, or None where PyTorch comes without Triton."""
    try:
        return importlib.import_module("cudnn_mha.padding_kernel")
    except ImportError:
        return None
