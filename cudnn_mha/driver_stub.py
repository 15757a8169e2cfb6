"""A stand-in for the NVIDIA driver library on a machine without a driver.

cuDNN's engines link to ``libcuda.so.1``, but planning and compiling a graph for a described GPU
calls nothing in it that matters. The stand-in exports the functions that cuDNN looks up; each
answers ``CUDA_ERROR_NO_DEVICE``, so whatever would really touch a GPU fails cleanly. It is written
byte by byte, because a machine without a driver often has no compiler either.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import tempfile
import threading
from pathlib import Path

SONAME = "libcuda.so.1"

# Exported besides the functions: tells the stand-in from a driver, whoever loaded it.
MARKER = "cudnn_mha_driver_stub"

FUNCTIONS = tuple(
    """
    cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString cuGetProcAddress cuGetProcAddress_v2
    cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDevicePrimaryCtxRetain
    cuCtxGetCurrent cuCtxSetCurrent cuCtxGetDevice cuCtxGetLimit cuCtxGetStreamPriorityRange
    cuCtxPopCurrent cuCtxPopCurrent_v2 cuCtxPushCurrent cuCtxPushCurrent_v2
    cuStreamGetCtx cuStreamIsCapturing
    cuLinkCreate cuLinkCreate_v2 cuLinkAddData cuLinkAddData_v2 cuLinkComplete cuLinkDestroy
    cuModuleLoadData cuModuleLoadDataEx cuModuleUnload cuModuleGetFunction cuModuleGetGlobal_v2
    cuModuleGetLoadingMode
    cuLibraryLoadData cuLibraryLoadFromFile cuLibraryGetKernel cuLibraryGetModule cuLibraryUnload
    cuKernelGetFunction cuKernelGetAttribute cuKernelSetAttribute
    cuFuncLoad cuFuncGetAttribute cuFuncSetAttribute
    cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel
    cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialClusterSize
    cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
    cuMemcpyHtoDAsync_v2 cuMemsetD8Async
    """.split()
)

_TEXT = b"no CUDA driver on this machine\0"
_hex = bytes.fromhex

# Code of the functions that do not just answer CUDA_ERROR_NO_DEVICE, which "" stands for:
# the version is 13000, the count 0, the text lies right behind the code that points to it.
_X86_64 = {
    "": _hex("b864000000 c3"),  # mov eax, 100; ret
    "cuDriverGetVersion": _hex("c707c8320000 31c0 c3"),  # mov [rdi], 13000; xor eax, eax; ret
    "cuDeviceGetCount": _hex("c70700000000 31c0 c3"),  # mov [rdi], 0; xor eax, eax; ret
    # lea rax, [rip + 6]; mov [rsi], rax; xor eax, eax; ret
    "cuGetErrorString": _hex("488d0506000000 488906 31c0 c3") + _TEXT,
}
_AARCH64 = {
    "": _hex("800c8052 c0035fd6"),  # mov w0, 100; ret
    # mov w8, 13000; str w8, [x0]; mov w0, 0; ret
    "cuDriverGetVersion": _hex("08598652 080000b9 00008052 c0035fd6"),
    # mov w8, 0; str w8, [x0]; mov w0, 0; ret
    "cuDeviceGetCount": _hex("08008052 080000b9 00008052 c0035fd6"),
    # adr x8, . + 16; str x8, [x1]; mov w0, 0; ret
    "cuGetErrorString": _hex("88000010 280000f9 00008052 c0035fd6") + _TEXT,
}
_MACHINES = {"x86_64": (62, _X86_64), "aarch64": (183, _AARCH64)}  # with ELF's numbers for them

_lock = threading.Lock()


def write(path: Path, machine: str = platform.machine()) -> Path:
    """Writes the stand-in, an ELF shared object, for that kind of machine.

    Args:
        path: the file to write.
        machine: ``x86_64`` or ``aarch64``.

    Raises:
        ValueError: another machine.
    """
    if machine not in _MACHINES:
        raise ValueError(f"machine must be one of {', '.join(_MACHINES)}, got {machine!r}")
    path.write_bytes(_shared_object(*_MACHINES[machine]))
    return path


def driver_present() -> bool:
    """Whether this process can open a real NVIDIA driver library."""
    library = _open()
    return library is not None and not hasattr(library, MARKER)


def load() -> None:
    """Loads the stand-in into this process, where it then answers to the driver's name.

    Call it before cuDNN looks for the driver. A second call does nothing.

    Raises:
        RuntimeError: there is a real driver, this machine or system is not supported, or the
            temporary directory forbids loading code from it.
    """
    with _lock:
        if driver_present():
            raise RuntimeError(f"this machine has an NVIDIA driver: {SONAME} needs no stand-in")
        if _open() is not None:
            return
        machine = platform.machine()
        if sys.platform != "linux" or machine not in _MACHINES:
            raise RuntimeError(
                f"no NVIDIA driver here, and its stand-in exists for Linux on "
                f"{' and '.join(_MACHINES)} only, not for {sys.platform} on {machine}"
            )
        with tempfile.TemporaryDirectory(prefix="cudnn_mha-") as folder:
            try:
                ctypes.CDLL(str(write(Path(folder) / SONAME, machine)), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise RuntimeError(
                    f"the stand-in for {SONAME} cannot be loaded from {folder} ({error}); "
                    "set TMPDIR to a directory that allows executable files"
                ) from error


def _open() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(SONAME)
    except OSError:
        return None


def _shared_object(machine: int, code_of: dict[str, bytes]) -> bytes:
    """The least that a dynamic loader accepts: no sections, one hash bucket."""
    page = 0x10000  # the largest that either machine uses
    names = (*FUNCTIONS, MARKER)
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (*names, SONAME))

    def place(name: str) -> int:
        return strings.index(b"\0" + name.encode() + b"\0") + 1

    # All symbols hang in one chain, 1 -> 2 -> ... -> 0, so that no name needs hashing.
    count = len(names) + 1
    hashes = struct.pack(f"<{count + 3}I", 1, count, 1, 0, *range(2, count), 0)

    hashes_at = 64 + 4 * 56  # behind the header and four program headers
    symbols_at = _aligned(hashes_at + len(hashes), 8)
    strings_at = symbols_at + 24 * count
    code_at = _aligned(strings_at + len(strings), 16)

    code, address_of = b"", {}
    for name, body in code_of.items():
        address_of[name] = code_at + len(code)
        code += body.ljust(_aligned(len(body), 16), b"\0")
    dynamic_at = code_at + len(code)

    symbols = bytes(24)
    for name in names:
        key = name if name in code_of else ""
        # 0x12: a global function. Of the section number the loader asks only that it is not 0.
        symbols += struct.pack(
            "<IBBHQQ", place(name), 0x12, 0, 1, address_of[key], len(code_of[key])
        )

    dynamic = struct.pack(
        "<14Q",
        *(14, place(SONAME)),  # DT_SONAME
        *(4, hashes_at),  # DT_HASH
        *(5, strings_at),  # DT_STRTAB
        *(10, len(strings)),  # DT_STRSZ
        *(6, symbols_at),  # DT_SYMTAB
        *(11, 24),  # DT_SYMENT
        *(0, 0),  # DT_NULL
    )

    def segment(kind: int, flags: int, at: int, size: int, align: int, base: int = 0) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, at, base + at, base + at, size, size, align)

    # The loader relocates the dynamic table in place: it needs a writable page of its own.
    segments = (
        segment(1, 5, 0, dynamic_at, page),  # PT_LOAD, read and execute
        segment(1, 6, dynamic_at, len(dynamic), page, page),  # PT_LOAD, read and write
        segment(2, 6, dynamic_at, len(dynamic), 8, page),  # PT_DYNAMIC
        segment(0x6474E551, 6, 0, 0, 16),  # PT_GNU_STACK, not executable
    )
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",  # 64 bits, little-endian
        *(3, machine, 1),  # ET_DYN
        *(0, 64, 0, 0),  # no entry point; the program headers follow at 64; no sections
        *(64, 56, len(segments), 0, 0, 0),
    )
    image = (header + b"".join(segments) + hashes).ljust(symbols_at, b"\0") + symbols + strings
    return image.ljust(code_at, b"\0") + code + dynamic


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
