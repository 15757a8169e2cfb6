"""The stand-in for the driver: the file itself, and what a process sees that loads it."""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_mha import driver_stub

MACHINES = ("x86_64", "aarch64")

runs_here = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES or driver_stub.driver_present(),
    reason="needs Linux on x86_64 or aarch64 without an NVIDIA driver",
)


def run(code: str, *arguments: str) -> dict[str, object]:
    """What the code prints as JSON, in a process of its own: a library stays loaded for good."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def dynamic_table(image: bytes) -> dict[int, int]:
    """The dynamic section, found the way a loader finds it: over the program headers."""
    at, size, count = (
        struct.unpack_from(f, image, o)[0] for f, o in (("<Q", 32), ("<H", 54), ("<H", 56))
    )
    for header in range(at, at + size * count, size):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", image, header)
        if kind == 2:
            return dict(struct.iter_unpack("<QQ", image[offset : offset + length]))
    raise AssertionError("no PT_DYNAMIC")


def text_at(image: bytes, offset: int) -> str:
    return image[offset : image.index(b"\0", offset)].decode()


def symbols(image: bytes) -> dict[str, bytes]:
    """Names and code of the exported functions."""
    table = dynamic_table(image)
    count = struct.unpack_from("<I", image, table[4] + 4)[0]
    rows = [struct.unpack_from("<IBBHQQ", image, table[6] + 24 * row) for row in range(1, count)]
    return {text_at(image, table[5] + row[0]): image[row[4] : row[4] + row[5]] for row in rows}


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_header_names_the_machine_and_the_driver(tmp_path: Path, machine: str, number: int) -> None:
    image = driver_stub.write(tmp_path / "stub.so", machine).read_bytes()
    assert image[:7] == b"\x7fELF\x02\x01\x01"
    assert struct.unpack_from("<HH", image, 16) == (3, number)
    table = dynamic_table(image)
    assert text_at(image, table[5] + table[14]) == "libcuda.so.1"


@pytest.mark.parametrize("machine", MACHINES)
def test_exports_every_function_once(tmp_path: Path, machine: str) -> None:
    image = driver_stub.write(tmp_path / "stub.so", machine).read_bytes()
    assert len(set(driver_stub.FUNCTIONS)) == len(driver_stub.FUNCTIONS) == 54
    assert list(symbols(image)) == [*driver_stub.FUNCTIONS, "cudnn_mha_driver_stub"]


@pytest.mark.parametrize("machine", MACHINES)
def test_hash_chain_reaches_every_symbol(tmp_path: Path, machine: str) -> None:
    image = driver_stub.write(tmp_path / "stub.so", machine).read_bytes()
    at = dynamic_table(image)[4]
    buckets, count, first = struct.unpack_from("<III", image, at)
    chain = struct.unpack_from(f"<{count}I", image, at + 12)
    visited = [first]
    while chain[visited[-1]]:
        visited.append(chain[visited[-1]])
    assert buckets == 1
    assert visited == list(range(1, 56))


@pytest.mark.parametrize(
    ("machine", "no_device"), [("x86_64", "b864000000c3"), ("aarch64", "800c8052c0035fd6")]
)
def test_only_three_functions_have_code_of_their_own(
    tmp_path: Path, machine: str, no_device: str
) -> None:
    image = driver_stub.write(tmp_path / "stub.so", machine).read_bytes()
    assert {name for name, code in symbols(image).items() if code.hex() != no_device} == {
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuGetErrorString",
    }


def test_write_refuses_another_machine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of x86_64, aarch64, got 'riscv64'"):
        driver_stub.write(tmp_path / "stub.so", "riscv64")
    assert list(tmp_path.iterdir()) == []


@runs_here
def test_every_function_answers(tmp_path: Path) -> None:
    path = driver_stub.write(tmp_path / "stub.so")
    code = """
import ctypes, json, sys
stub = ctypes.CDLL(sys.argv[1])
count, version, text = ctypes.c_int(-1), ctypes.c_int(-1), ctypes.c_char_p()
print(json.dumps({
    "count": [stub.cuDeviceGetCount(ctypes.byref(count)), count.value],
    "version": [stub.cuDriverGetVersion(ctypes.byref(version)), version.value],
    "text": [stub.cuGetErrorString(100, ctypes.byref(text)), text.value.decode()],
    "others": {name: getattr(stub, name)() for name in sys.argv[2:]},
}))
"""
    special = {"cuDeviceGetCount", "cuDriverGetVersion", "cuGetErrorString"}
    others = [name for name in driver_stub.FUNCTIONS if name not in special]
    assert run(code, str(path), *others) == {
        "count": [0, 0],
        "version": [0, 13000],
        "text": [0, "no CUDA driver on this machine"],
        "others": dict.fromkeys(others, 100),
    }


@runs_here
def test_load_answers_to_the_drivers_name_and_leaves_no_file(tmp_path: Path) -> None:
    code = """
import ctypes, json, sys, tempfile, threading
from importlib import reload
from cudnn_mha import driver_stub
tempfile.tempdir = sys.argv[1]
before = driver_stub.driver_present()
threads = [threading.Thread(target=driver_stub.load) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
reload(driver_stub).load()
print(json.dumps({
    "before": before,
    "after": driver_stub.driver_present(),
    "cuInit": ctypes.CDLL("libcuda.so.1").cuInit(0),
    "global": ctypes.CDLL(None).cuInit(0),
    "copies": len({row.split(None, 5)[5] for row in open("/proc/self/maps") if "libcuda" in row}),
}))
"""
    expected = {"before": False, "after": False, "cuInit": 100, "global": 100, "copies": 1}
    assert run(code, str(tmp_path)) == expected
    assert list(tmp_path.iterdir()) == []


class Driver:
    """Stands for an opened library; a real driver lacks the stand-in's marker."""


def test_load_refuses_where_a_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_library(name: str, mode: int = ctypes.DEFAULT_MODE) -> Driver:
        opened.append(name)
        return Driver()

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    assert driver_stub.driver_present() is True
    with pytest.raises(RuntimeError, match=r"has an NVIDIA driver: libcuda\.so\.1 needs no"):
        driver_stub.load()
    assert set(opened) == {"libcuda.so.1"}


def test_the_stand_in_is_not_taken_for_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Driver()
    stub.cudnn_mha_driver_stub = None  # type: ignore[attr-defined]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: stub)
    assert driver_stub.driver_present() is False


def refuse_to_open(name: str, mode: int = ctypes.DEFAULT_MODE) -> Driver:
    raise OSError(f"{name}: failed to map segment from shared object")


@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "riscv64"), ("darwin", "arm64"), ("win32", "AMD64")]
)
def test_load_refuses_other_machines(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", refuse_to_open)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(RuntimeError, match=f"Linux on x86_64 and aarch64 only, not for {system} "):
        driver_stub.load()


def test_load_says_what_to_do_where_code_may_not_be_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", refuse_to_open)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(RuntimeError, match=r"failed to map segment.*set TMPDIR"):
        driver_stub.load()
