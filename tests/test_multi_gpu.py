"""Two GPUs in one process: one plan cache, tensors on either whichever is current, threads."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnn_mha
from cudnn_mha import config, cudnn_sdpa, recording
from tests.oracle import NAMES, Call, Results, assert_right
from tests.test_gpu_values import call, call_with_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

STRESS_SECONDS = float(os.environ.get("CUDNN_MHA_STRESS_SECONDS", "4"))


@pytest.fixture(autouse=True)
def _first_is_current() -> Iterator[None]:
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    with cudnn_mha.enabled():
        yield
    assert torch.cuda.current_device() == 0


def on(index: int, **options: Any) -> Call:
    """A call on that GPU, with the gradient of its output."""
    with torch.cuda.device(index):
        case = call_with_gradient(call(**options))
    assert case.query.get_device() == index
    return case


def through_pytorch(case: Call, *, gradients: bool = True, **options: Any) -> Results:
    leaves = case.leaves()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = F.scaled_dot_product_attention(*leaves[:3], case.mask, **case.options, **options)
    found = torch.autograd.grad(output, leaves, case.grad_output)
    return {"output": output.detach(), **dict(zip(NAMES, found, strict=False))}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_values_whichever_is_current(index: int, causal: bool) -> None:
    cudnn_mha.cache_clear()
    case = on(index, heads=(4, 2, 2), lengths=(136, 200), is_causal=causal)
    for current in (0, 1):
        torch.cuda.set_device(current)
        assert_right(case)
        assert_right(case, results=through_pytorch)
    torch.cuda.set_device(0)


def test_options_on_the_gpu_that_is_not_current() -> None:
    lengths = torch.tensor([100, 17], device="cuda:1")
    assert_right(on(1, lengths=(120, 120), dims=(20, 20)))
    assert_right(on(1, lengths=(120, 120), is_causal=True, window=(31, 0)))
    assert_right(on(1, lengths=(120, 120), seq_lens_q=lengths, seq_lens_kv=lengths))
    mask = torch.randn(120, 120, device="cuda:1", requires_grad=True)
    assert_right(on(1, lengths=(120, 120), mask=mask))


def test_dropout_is_drawn_where_the_tensors_are() -> None:
    case = on(1, lengths=(128, 128))
    outputs = []
    for _ in range(2):
        with torch.cuda.device(1):
            torch.cuda.manual_seed(3)
        torch.rand(1, device="cuda:0")  # another generator, which must not matter
        outputs.append(cudnn_sdpa(case.query, case.key, case.value, dropout_p=0.5, fallback=False))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], cudnn_sdpa(case.query, case.key, case.value))


def test_tensors_of_two_gpus_are_refused() -> None:
    query, key = on(0).query, on(1).key
    with pytest.raises(RuntimeError, match="device"):
        cudnn_sdpa(query, key, key)


def test_plans_compiled_ahead_serve_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder names the kind of GPU, not its number."""
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("the two GPUs are of different kinds")
    cases = [on(index, lengths=(104, 152), is_causal=True) for index in (0, 1)]
    monkeypatch.setenv(config.CACHE_DIR, str(tmp_path / "plans"))
    monkeypatch.setenv(config.LENGTHS, "exact")
    config.reload()
    cudnn_mha.cache_clear()
    try:
        with cudnn_mha.record(tmp_path / "calls"):
            assert_right(cases[0])
        assert cudnn_mha.cache_info().builds > 0
        assert recording.read([tmp_path / "calls"])
        monkeypatch.setenv(config.BUILD, "never")
        config.reload()
        cudnn_mha.cache_clear()
        for case in (cases[1], cases[0]):
            assert_right(case)
        now = cudnn_mha.cache_info()
        assert now.builds == 0 and now.loads >= 4
    finally:
        monkeypatch.undo()
        config.reload()
        cudnn_mha.cache_clear()


def test_a_stream_of_each_gpu_waits_for_the_other() -> None:
    """What one computes is read by the other, over streams that are not the default ones."""
    first = on(0, lengths=(512, 512))
    want = cudnn_sdpa(first.query, first.key, first.value)
    want = cudnn_sdpa(want, first.key, first.value)
    copies = [t.to("cuda:1") for t in (first.key, first.value)]
    for device in (0, 1):
        torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            middle = cudnn_sdpa(first.query, first.key, first.value)
            there = middle.to("cuda:1", non_blocking=True)
        streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[1]):
            last = cudnn_sdpa(there, *copies)
        middle.record_stream(streams[0])
        there.record_stream(streams[1])
        streams[1].synchronize()
        got = last.to("cuda:0")
        assert (got.double() - want.double()).norm() <= 4e-3 * want.double().norm()


def random_case(rng: random.Random, index: int) -> Call:
    length = rng.choice([1, 33, 64, 128, 200])
    heads = rng.choice([(4, 4, 4), (4, 2, 2)])
    return on(index, heads=heads, lengths=(length, 192), is_causal=rng.random() < 0.5)


def results_of(case: Call, *, pytorch: bool) -> Results:
    attend: Any = F.scaled_dot_product_attention if pytorch else cudnn_sdpa
    leaves = case.leaves()
    output = attend(*leaves, **case.options)
    found = torch.autograd.grad(output, leaves, case.grad_output)
    return {"output": output.detach(), **dict(zip(NAMES, found, strict=False))}


def test_stress_of_threads_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads that change GPU and stream with every call, while plans are dropped."""
    from cudnn_mha.cache import plans

    monkeypatch.setattr(plans, "_maxsize", 12)
    rng = random.Random(0)
    cases = [random_case(rng, number % 2) for number in range(16)]
    wanted = [results_of(case, pytorch=True) for case in cases]
    for device in (0, 1):
        torch.cuda.synchronize(device)
    wrong: list[str] = []
    calls = [0] * 8
    deadline = time.monotonic() + STRESS_SECONDS

    def work(number: int) -> None:
        own = random.Random(number)
        streams = [torch.cuda.Stream(index) for index in (0, 1)]
        try:
            while time.monotonic() < deadline and not wrong:
                i = own.randrange(len(cases))
                # Both GPUs have a stream of this thread's, and the last one is the current GPU.
                outer, inner = own.sample(streams, 2)
                with torch.cuda.stream(outer), torch.cuda.stream(inner):
                    got = results_of(cases[i], pytorch=own.random() < 0.5)
                    streams[i % 2].synchronize()
                for name, value in got.items():
                    want = wanted[i][name].double()
                    if not (value.double() - want).norm() <= 4e-3 * want.norm() + 1e-6:
                        wrong.append(f"case {i} {name}: {cases[i].options}")
                calls[number] += 1
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]
    assert min(calls) > 0
    print(f"{sum(calls)} calls in {STRESS_SECONDS:g} s")
