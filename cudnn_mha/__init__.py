"""cuDNN attention for PyTorch through the cuDNN frontend's graph API.

The public names are imported on first use: importing the package loads neither torch nor cuDNN
and needs no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_mha.cache import CacheInfo, cache_clear, cache_info
    from cudnn_mha.checks import Reason
    from cudnn_mha.errors import CudnnSdpaUnsupportedError, CudnnUnavailableError
    from cudnn_mha.explanation import Explanation, explain
    from cudnn_mha.functional import cudnn_sdpa

_WHERE = {
    "CacheInfo": "cache",
    "CudnnSdpaUnsupportedError": "errors",
    "CudnnUnavailableError": "errors",
    "Explanation": "explanation",
    "Reason": "checks",
    "cache_clear": "cache",
    "cache_info": "cache",
    "cudnn_sdpa": "functional",
    "explain": "explanation",
}

__all__ = [
    "CacheInfo",
    "CudnnSdpaUnsupportedError",
    "CudnnUnavailableError",
    "Explanation",
    "Reason",
    "__version__",
    "cache_clear",
    "cache_info",
    "cudnn_sdpa",
    "explain",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
