"""The demonstration: what it says and finds, on a GPU's branch with the GPU made up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cudnn_mha import config, demo, devices, runtime
from cudnn_mha.errors import CudnnUnavailableError
from tests.support import ESCAPE, parsed, run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_demo_without_a_gpu() -> None:
    result = run("demo", "--json")
    found = parsed(result)
    assert result.exit_code == 0
    assert (found["ok"], found["gpu"], found["described"]) == (True, False, True)
    assert found["device"] == "NVIDIA H200"
    assert found["cudnn"] == config.version_text(runtime.cudnn_version())
    assert found["summary"].startswith("No GPU here: nothing was run on a GPU.")
    assert "for a described NVIDIA H200" in found["summary"]
    assert [call["name"] for call in found["calls"]] == [call.name for call in demo.CALLS]
    for call, given in zip(found["calls"], demo.CALLS, strict=True):
        assert call["failure"] is None
        assert 0 < call["error"] < 2e-6  # float32 rounds to 6e-8
        assert [graph["direction"] for graph in call["graphs"]] == list(given.directions)
        for graph in call["graphs"]:
            assert graph["engine"].startswith("eng")
            assert isinstance(graph["workspace"], int)
            assert graph["milliseconds"] == {}
            assert graph["speedup"] is None


@pytest.mark.usefixtures("no_gpu")
def test_demo_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CALLS", demo.CALLS[-2:])
    result = run("demo", "--gpu", "h200")
    assert (result.exit_code, result.stderr) == (0, "")
    assert ESCAPE not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].startswith("No GPU here: nothing was run on a GPU. The graphs were compiled")
    assert lines[-1] == "every graph compiled, every value is right"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    rows = [row for row in cells if len(row) == 7]
    assert [row[0] for row in rows] == [
        *("odd lengths, causal", "8,16,777,64"),
        *("D = 256, forward", "4,8,2048,256"),
    ]
    assert [row[1] for row in rows] == ["forward", "backward", "forward", ""]
    assert all(row[2].startswith("eng") for row in rows[:3])
    assert rows[0][6] == "2,4,97,64"


@pytest.mark.usefixtures("no_gpu")
def test_demo_fails_where_a_call_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 4, 128, 256)
    monkeypatch.setattr(demo, "CALLS", (demo.Call("too wide", shape, shape),))
    result = run("demo", "--gpu", "a10", "--json")
    assert result.exit_code == 1
    (call,) = parsed(result)["calls"]
    assert "backward not served by cuDNN: the backward on sm_86" in call["failure"]
    assert call["error"] is None
    text = run("demo", "--gpu", "a10")
    assert text.exit_code == 1
    assert text.stdout.splitlines()[-1] == f"failed  too wide: {call['failure']}"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("spoil", [1.0001, float("nan")])
def test_demo_fails_where_a_value_is_wrong(monkeypatch: pytest.MonkeyPatch, spoil: float) -> None:
    ours = demo._ours

    def wrong(call: demo.Call, *, fallback: bool) -> Callable[..., Any]:
        attend = ours(call, fallback=fallback)
        return lambda *tensors: attend(*tensors) * spoil

    monkeypatch.setattr(demo, "CALLS", demo.CALLS[-1:])
    monkeypatch.setattr(demo, "_ours", wrong)
    result = run("demo", "--json")
    found = parsed(result)
    assert (result.exit_code, found["ok"]) == (1, False)
    (call,) = found["calls"]
    assert call["failure"].startswith("wrong values: relative error ")
    assert call["error"] == (None if spoil != spoil else pytest.approx(1e-4, rel=0.05))


def test_demo_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise CudnnUnavailableError("no cuDNN here")

    monkeypatch.setattr(runtime, "cudnn_version", missing)
    result = run("demo", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: no cuDNN here\n"


def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU is the CPU: PyTorch computes, and a clock ticks that counts calls."""
    here = devices.described("h200")
    data = demo._data
    ticks = iter(range(10**6))

    def attend(query: Any, key: Any, value: Any, mask: Any, *, call: demo.Call) -> Any:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=call.causal, enable_gqa=call.gqa
        )

    def clock(step: Callable[[], object]) -> float:
        step()
        return float(next(ticks))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "cuda", lambda index: here)
    monkeypatch.setattr(demo, "_data", lambda call, dtype, device: data(call, dtype, "cpu"))
    monkeypatch.setattr(demo, "_ours", lambda call, fallback: functools.partial(attend, call=call))
    monkeypatch.setattr(demo, "_cuda_clock", lambda: clock)
    monkeypatch.setattr(demo, "CALLS", (demo.CALLS[-2].small(),))


def test_demo_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_gpu(monkeypatch)
    result = run("demo", "--json")
    found = parsed(result)
    assert result.exit_code == 0
    assert (found["gpu"], found["described"]) == (True, False)
    assert found["summary"].startswith("Ran on NVIDIA H200 with cuDNN ")
    (call,) = found["calls"]
    assert call["checked"] == call["shape"] == "2,4,97,64"
    assert 1e-4 < call["error"] < call["limit"] == demo.HALF_FLOOR
    assert [graph["direction"] for graph in call["graphs"]] == ["forward", "backward"]
    for graph in call["graphs"]:
        times = graph["milliseconds"]
        assert list(times) == ["cudnn_mha", *demo.PEERS]
        # On a CPU there is FlashAttention, and no other of the peers.
        assert times["CUDNN_ATTENTION"] is times["EFFICIENT_ATTENTION"] is None
        assert times["FLASH_ATTENTION"] == times["cudnn_mha"] + 1
        assert graph["speedup"] == times["FLASH_ATTENTION"] / times["cudnn_mha"]

    lines = run("demo").stdout.splitlines()
    assert lines[0] == found["summary"]
    assert lines[-1] == "every graph ran, every value is right"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    forward, backward = (row for row in cells if len(row) == 9)
    engine = call["graphs"][0]["engine"].split("_")[0]
    assert forward[:3] == ["odd lengths, causal", "forward", engine]
    assert backward[:2] == ["2,4,97,64", "backward"]
    assert [forward[i] for i in (5, 7)] == ["-", "-"]


def test_described_gpu_on_a_machine_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_gpu(monkeypatch)
    found = parsed(result := run("demo", "--gpu", "h200", "--json"))
    assert result.exit_code == 0
    assert (found["gpu"], found["described"]) == (False, True)
    assert found["summary"].startswith("--gpu describes a GPU: nothing was run on a GPU.")


def test_refusal_of_ours_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    data = demo._data
    call = demo.CALLS[-1].small()
    monkeypatch.setattr(demo, "_data", lambda call, dtype, device: data(call, dtype, "cpu"))
    result = demo.CallResult(call.name, call.shape)
    demo._run(call, result)
    assert result.failure is not None
    assert "the tensors must be on a CUDA device, got cpu [device]" in result.failure


def test_times_are_medians_of_turns() -> None:
    order = []

    def clock(step: Callable[[], object]) -> float:
        order.append(step())
        return float(len(order)) if step() == "a" else 5.0

    times = demo._median_times({"a": lambda: "a", "b": lambda: "b"}, clock)
    assert order == ["a", "b"] * (demo.SAMPLES + 1)
    assert times == {"a": 3 + 2 * (demo.SAMPLES // 2), "b": 5.0}


def test_the_error_is_the_largest_and_knows_nan() -> None:
    one, zero, nan = torch.ones(4), torch.zeros(4), torch.full((4,), torch.nan)
    assert demo._error([one, 1.5 * one, one], [one, one, one]) == 0.5
    assert demo._error([zero, one], [one, one]) == 1.0
    assert torch.tensor(demo._error([one, nan, one], [one, one, one])).isnan()


@pytest.mark.gpu
def test_demo_on_the_gpu_of_this_machine() -> None:
    result = run("demo", "--json")
    found = parsed(result)
    assert (result.exit_code, found["ok"], found["gpu"]) == (0, True, True), result.stdout
    assert found["device"] == torch.cuda.get_device_name()
    for call in found["calls"]:
        for graph in call["graphs"]:
            assert graph["milliseconds"]["cudnn_mha"] > 0
