"""cuDNN in this process: loading it, its versions, and one handle per thread and device."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

from cudnn_mha import config, driver_stub
from cudnn_mha.config import MIN_CUDNN, MIN_FRONTEND, version_text
from cudnn_mha.errors import CudnnUnavailableError

_DOCTOR = "`cudnn-mha doctor` shows what is installed and loaded"
_at_exit: list[Callable[[], None]] = []


@functools.cache
def library() -> ModuleType:
    """The cuDNN frontend with cuDNN loaded behind it; loaded on the first call.

    Raises:
        CudnnUnavailableError: something is missing, too old or broken; says what to do.
    """
    if torch.version.cuda is None:
        raise CudnnUnavailableError(
            f"torch {torch.__version__} is built without CUDA, and cuDNN's engines need the "
            "cuBLASLt and NVRTC that a CUDA build brings; install a CUDA build of torch"
        )
    if not driver_stub.driver_present():
        # cuDNN links to the driver even to plan for a described GPU.
        try:
            driver_stub.load()
        except RuntimeError as error:
            raise CudnnUnavailableError(f"there is no NVIDIA driver, and {error}") from error
    try:
        cudnn = importlib.import_module("cudnn")
    except Exception as error:  # a broken installation fails in many ways; all mean the same
        raise CudnnUnavailableError(
            f"the cuDNN frontend cannot be imported ({type(error).__name__}: {error}); "
            f"`pip install nvidia-cudnn-frontend`; {_DOCTOR}"
        ) from error
    found = tuple(int(part) for part in cudnn.__version__.split(".")[:2])
    if found < MIN_FRONTEND:
        needed = ".".join(map(str, MIN_FRONTEND))
        raise CudnnUnavailableError(
            f"nvidia-cudnn-frontend {cudnn.__version__} is too old, {needed} is needed; "
            f"`pip install -U nvidia-cudnn-frontend`"
        )
    try:
        version = int(cudnn.backend_version())
    except Exception as error:
        raise CudnnUnavailableError(
            f"cuDNN itself cannot be loaded ({error}); a CUDA build of torch brings it, else "
            f"install the extra cu12 or cu13 that matches torch.version.cuda "
            f"({torch.version.cuda}); {_DOCTOR}"
        ) from error
    if version < MIN_CUDNN:
        raise CudnnUnavailableError(
            f"cuDNN {version_text(version)} is too old, {version_text(MIN_CUDNN)} is needed; "
            f"a newer torch brings a newer cuDNN; {_DOCTOR}"
        )
    return cudnn


def cudnn_version() -> int:
    """Version of the loaded cuDNN, 91900 for 9.19.0."""
    return int(library().backend_version())


def plan_environment() -> tuple[str, ...]:
    """What a plan depends on besides versions: the CUDA that torch is built for, variables."""
    major = str(torch.version.cuda).split(".")[0]
    return (f"CUDA {major}", *config.plan_environment())


def frontend_at_least(*version: int) -> bool:
    """Whether the cuDNN frontend is at least that version."""
    return tuple(int(part) for part in frontend_version().split(".")[:2]) >= version


def frontend_version() -> str:
    """Version of the cuDNN frontend."""
    return str(library().__version__)


MOST_OPERANDS = 256
"""Operands that a plan may have: besides tensors the numbers in operations on the scores."""


class Lease:
    """A cuDNN handle in the hands of one thread; goes back when the thread ends.

    Attributes:
        backend: the backend's handle, an address.
        stream: the raw stream that it was set to last.
        buffer: room for the addresses of a plan's operands.
        address: where that room is.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        with _lock:
            idle = _idle.setdefault(index, [])
            handle = idle.pop() if idle else None
        if handle is None:
            with torch.cuda.device(index):
                handle = library().create_handle()
            _all_handles.append(handle)
        self.handle: Any = handle
        self.backend = self.handle.backend_handle
        self.stream: int | None = None
        self.buffer = (ctypes.c_uint64 * MOST_OPERANDS)()
        self.address = ctypes.addressof(self.buffer)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            _idle.get(self.index, []).append(self.handle)


# cuDNN handles are not thread-safe and belong to one device.
_leases = threading.local()
_idle: dict[int, list[Any]] = {}
_all_handles: list[Any] = []
_lock = threading.Lock()


def lease(index: int, stream: int) -> Lease:
    """This thread's handle for CUDA device ``index``, set to the raw ``stream``."""
    try:
        found: Lease = _leases.by_device[index]
    except (AttributeError, KeyError):
        found = Lease(index)
        _leases.__dict__.setdefault("by_device", {})[index] = found
    if found.stream != stream:  # setting it queries the driver each time
        library().set_stream(found.handle, stream)
        found.stream = stream
    return found


current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: 0
)
"""The raw CUDA stream that is current on device ``index``."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
"""The current CUDA device."""

allocate: Callable[[int, int], int] = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_alloc", lambda size, stream: 0
)
"""Device memory for ``(bytes, stream)`` of the current device from PyTorch's allocator."""

free: Callable[[int], None] = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_delete", lambda address: None
)
"""Gives it back; work already queued on the stream may still use it."""


Made = TypeVar("Made")


Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(function: Function) -> Function:
    """The function as compilers leave it alone; other calls do not load them."""
    opaque = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return opaque(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


def is_distributed(tensor: object) -> bool:
    """Whether it stands for memory of other ranks too, or for memory still on its way.

    That is a `DTensor`, or what a collective returns: operators unwrap them.
    """
    return type(tensor).__module__.startswith("torch.distributed.")


def sharding_rules() -> ModuleType | None:
    """The module of sharding rules, where somebody may use `DTensor`; it loads nothing else."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    return importlib.import_module("cudnn_mha.integrations.distributed")


def outside_pools(make: Callable[[], Made]) -> Made:
    """What ``make`` gives, which may keep device memory for as long as it likes.

    It runs on a thread of its own: what this one allocates may lie in the pool of a CUDA graph,
    where PyTorch lets nothing live on but the graph's results.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


_captured: list[object] = []


def keep_for_captures(held: object) -> None:
    """Keeps what holds device memory for good, if a CUDA graph that reads it is being captured."""
    if torch.cuda.is_current_stream_capturing() and held not in _captured:
        _captured.append(held)


def on_exit(release: Callable[[], None]) -> None:
    """Runs ``release`` at interpreter exit, the last registered first, before the handles go."""
    _at_exit.append(release)


@atexit.register
def _release() -> None:
    # The frontend reports whatever of its objects outlives the interpreter.
    for release in reversed(_at_exit):
        release()
    _captured.clear()
    _leases.__dict__.clear()
    _idle.clear()
    while _all_handles:
        try:
            library().destroy_handle(_all_handles.pop())
        except RuntimeError:  # the CUDA context is gone or broken, and the handle with it
            pass
