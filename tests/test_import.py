"""What is loaded when, what a broken installation does, and a quiet exit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

import cudnn_mha
from cudnn_mha import CudnnUnavailableError, config, runtime

PUBLIC = [
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


def run(code: str) -> tuple[dict[str, Any], str]:
    """What code prints as JSON, and its standard error, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def test_the_package_loads_nothing_until_it_is_used() -> None:
    found, errors = run("""
import json, sys, time
start = time.perf_counter()
import cudnn_mha
package = time.perf_counter() - start
bare = sorted({"torch", "cudnn", "cudnn_mha.spec"} & set(sys.modules))
import torch
start = time.perf_counter()
cudnn_mha.cudnn_sdpa, cudnn_mha.explain, cudnn_mha.cache_info
names = time.perf_counter() - start
tensor = torch.zeros(1, 2, 4, 8)
cudnn_mha.cudnn_sdpa(tensor, tensor, tensor)
loaded = "cudnn" in sys.modules
print(json.dumps({"package": package, "names": names, "bare": bare, "loaded": loaded}))
""")
    assert found["bare"] == []
    assert not found["loaded"]
    assert found["package"] < 0.5
    assert found["names"] < 2.0  # on a busy machine; tens of milliseconds on an idle one
    assert errors == ""


def test_the_public_names() -> None:
    assert sorted(cudnn_mha.__all__) == PUBLIC
    assert dir(cudnn_mha) == PUBLIC
    for name in PUBLIC:
        assert getattr(cudnn_mha, name) is not None
        if name != "__version__":
            assert getattr(cudnn_mha, name).__name__ == name
            assert getattr(cudnn_mha, name).__doc__
    assert cudnn_mha.__version__.count(".") == 2


def test_unknown_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match=r"module 'cudnn_mha' has no attribute 'attend'"):
        _ = cudnn_mha.attend
    assert not hasattr(cudnn_mha, "nothing")


def test_exit_is_quiet_after_compiling_for_a_described_gpu() -> None:
    found, errors = run("""
import json, threading
import cudnn_mha
shape = (1, 2, 64, 64)
def work():
    return cudnn_mha.explain(shape, shape, shape, requires_grad=True, gpu="h200")
kept = work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps({"served": kept.served, "builds": cudnn_mha.cache_info().builds}))
""")
    assert found == {"served": True, "builds": 2}
    assert "nanobind" not in errors
    assert "Traceback" not in errors


def test_at_exit_the_last_registered_is_the_first_to_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So no thread is still building when plans are made to let go of cuDNN's objects."""
    order: list[str] = []
    hooks = [lambda: order.append("plans"), lambda: order.append("threads")]
    monkeypatch.setattr(runtime, "_at_exit", hooks)
    monkeypatch.setattr(runtime, "_leases", threading.local())
    monkeypatch.setattr(runtime, "_idle", {})
    monkeypatch.setattr(runtime, "_all_handles", [])
    runtime._release()
    assert order == ["threads", "plans"]


def test_exit_is_quiet_where_a_plan_outlives_the_interpreter() -> None:
    """As one does to which the output of a training step still leads, through autograd."""
    found, errors = run("""
import ctypes, json
import cudnn_mha
from cudnn_mha.cache import plans
shape = (1, 2, 64, 64)
cudnn_mha.explain(shape, shape, shape, requires_grad=True, gpu="h200")
slots = list(plans._slots.values())
for slot in slots:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(slot.plan))
print(json.dumps({"plans": len(slots)}))
""")
    assert found == {"plans": 2}
    assert errors == ""


def test_a_missing_frontend_matters_only_to_who_needs_it() -> None:
    found, _ = run("""
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    error = ModuleNotFoundError("No module named 'cudnn'")
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cudnn":
            raise self.error
        return None

sys.meta_path.insert(0, Blocked())
import torch
from cudnn_mha import CudnnUnavailableError, cudnn_sdpa, explain, runtime
texts = []
for Blocked.error in (Blocked.error, OSError("libcudnn.so.9: file too short")):
    try:
        runtime.library()
    except CudnnUnavailableError as error:
        texts.append(str(error))
query = torch.eye(8).expand(1, 2, 8, 8)
same = torch.allclose(
    cudnn_sdpa(query, query, query),
    torch.nn.functional.scaled_dot_product_attention(query, query, query),
)
shape = (1, 2, 64, 12)
verdict = explain(shape, shape, shape, dropout_p=0.3, gpu="a10")
reasons = [[r.rule, r.kind.value, r.message] for r in verdict.reasons]
served = verdict.served
print(json.dumps({"texts": texts, "same": same, "reasons": reasons, "served": served}))
""")
    missing, broken = found["texts"]
    assert "ModuleNotFoundError: No module named 'cudnn'" in missing
    assert "`pip install nvidia-cudnn-frontend`" in missing
    assert "cudnn-mha doctor" in missing
    assert "OSError: libcudnn.so.9: file too short" in broken
    assert found["same"]
    assert not found["served"]
    (unavailable, dropout) = found["reasons"]
    assert unavailable[:2] == ["unavailable", "unavailable"]
    assert "`pip install nvidia-cudnn-frontend`" in unavailable[2]
    assert dropout[0] == "dropout"


class Frontend(ModuleType):
    """Stands in for the frontend: of any version, with any cuDNN behind it."""

    def __init__(self, version: str, backend: int | Exception) -> None:
        super().__init__("cudnn")
        self.__version__ = version
        self.backend = backend

    def backend_version(self) -> int:
        if isinstance(self.backend, Exception):
            raise self.backend
        return self.backend


@pytest.mark.parametrize(
    ("frontend", "words"),
    [
        (Frontend("1.27.9", 92400), ["nvidia-cudnn-frontend 1.27.9", "1.28", "pip install -U"]),
        (Frontend("0.9", 92400), ["0.9 is too old"]),
        (Frontend("1.32.0", 91899), ["cuDNN 9.18.99 is too old", "9.19.0", "newer torch"]),
        (Frontend("1.32.0", OSError("no libcudnn")), ["cannot be loaded (no libcudnn)", "cu13"]),
    ],
)
def test_what_is_too_old_or_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, frontend: Frontend, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    with pytest.raises(CudnnUnavailableError) as caught:
        runtime.library.__wrapped__()
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("version", ["1.28.0", "1.28.0rc1", "2.0", "1.100.1"])
def test_what_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    frontend = Frontend(version, config.MIN_CUDNN)
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    assert runtime.library.__wrapped__() is frontend


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CudnnUnavailableError, match=r"built without CUDA.*CUDA build of torch"):
        runtime.library.__wrapped__()
