"""cuDNN attention for PyTorch through the cuDNN frontend's graph API.

The public names are imported on first use: importing the package loads neither torch nor cuDNN
and needs no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_mha.backend import Status, disable, enable, enabled, status
    from cudnn_mha.cache import CacheInfo, cache_clear, cache_info
    from cudnn_mha.checks import Reason
    from cudnn_mha.errors import CudnnSdpaUnsupportedError, CudnnUnavailableError
    from cudnn_mha.explanation import Explanation, explain
    from cudnn_mha.explanation_layouts import explain_paged, explain_varlen
    from cudnn_mha.functional import cudnn_sdpa
    from cudnn_mha.functional_layouts import cudnn_sdpa_paged, cudnn_sdpa_varlen
    from cudnn_mha.precompile import compile_ahead, load_plans, warmup
    from cudnn_mha.recording import record
    from cudnn_mha.reference_layouts import merge

_WHERE = {
    "CacheInfo": "cache",
    "CudnnSdpaUnsupportedError": "errors",
    "CudnnUnavailableError": "errors",
    "Explanation": "explanation",
    "Reason": "checks",
    "Status": "backend",
    "cache_clear": "cache",
    "cache_info": "cache",
    "compile_ahead": "precompile",
    "cudnn_sdpa": "functional",
    "cudnn_sdpa_paged": "functional_layouts",
    "cudnn_sdpa_varlen": "functional_layouts",
    "disable": "backend",
    "enable": "backend",
    "enabled": "backend",
    "explain": "explanation",
    "explain_paged": "explanation_layouts",
    "explain_varlen": "explanation_layouts",
    "load_plans": "precompile",
    "merge": "reference_layouts",
    "record": "recording",
    "status": "backend",
    "warmup": "precompile",
}

__all__ = [
    "CacheInfo",
    "CudnnSdpaUnsupportedError",
    "CudnnUnavailableError",
    "Explanation",
    "Reason",
    "Status",
    "__version__",
    "cache_clear",
    "cache_info",
    "compile_ahead",
    "cudnn_sdpa",
    "cudnn_sdpa_paged",
    "cudnn_sdpa_varlen",
    "disable",
    "enable",
    "enabled",
    "explain",
    "explain_paged",
    "explain_varlen",
    "load_plans",
    "merge",
    "record",
    "status",
    "warmup",
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
