"""The exceptions this package raises on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_mha.checks import Reason


class CudnnUnavailableError(RuntimeError):
    """cuDNN, its frontend or a library that they need cannot be used in this process."""


class CudnnSdpaUnsupportedError(RuntimeError):
    """A call that cuDNN does not serve, with every reason that was found.

    Attributes:
        reasons: all the reasons, static rules first, cuDNN's own words last.
    """

    def __init__(self, call: str, reasons: Sequence[Reason]) -> None:
        self.call = call
        self.reasons = tuple(reasons)
        lines = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(f"cuDNN does not serve this attention call ({call}):\n{lines}")

    def __reduce__(self) -> tuple[type[CudnnSdpaUnsupportedError], tuple[Any, ...]]:
        return type(self), (self.call, self.reasons)
