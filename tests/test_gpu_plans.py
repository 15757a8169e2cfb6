"""Plans that outlive their process, on the GPU: from disk, from another machine, from a thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cudnn_mha
from cudnn_mha import cache, config, cudnn_sdpa, devices, recording, runtime
from tests.oracle import assert_right
from tests.test_gpu_values import call, call_with_gradient
from tests.test_store import VANDAL

pytestmark = pytest.mark.gpu

PROCESSES = int(os.environ.get("CUDNN_MHA_PROCESSES", "8"))

SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, cudnn_mha
    from cudnn_mha import cudnn_sdpa
    torch.manual_seed(0)
    results = []
    for length in (64, 200, 333):
        leaves = [
            torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        ]
        output = cudnn_sdpa(*leaves, is_causal=True, deterministic=True, fallback=False)
        grads = torch.autograd.grad(output, leaves, torch.ones_like(output))
        results += [output.detach().cpu(), *(g.cpu() for g in grads)]
    torch.save(results, sys.argv[1])
    print(json.dumps(cudnn_mha.cache_info()._asdict()))
    """
)


HAMMER = textwrap.dedent(
    """
    import json, random, sys, torch, cudnn_mha
    from cudnn_mha import cudnn_sdpa
    from torch.nn.attention import SDPBackend, sdpa_kernel
    draw, builds, loads = random.Random(int(sys.argv[1])), 0, 0
    for _ in range(4):
        for length in draw.sample(range(64, 640, 48), 5):
            leaves = [
                torch.randn(1, 2, length, 64, device="cuda", dtype=torch.float16).requires_grad_()
                for _ in range(3)
            ]
            exact = [t.detach().double().requires_grad_() for t in leaves]
            got = cudnn_sdpa(*leaves, fallback=False)
            with sdpa_kernel(SDPBackend.MATH):
                want = torch.nn.functional.scaled_dot_product_attention(*exact)
            upstream = torch.randn_like(got)
            found = [got, *torch.autograd.grad(got, leaves, upstream)]
            wanted = [want, *torch.autograd.grad(want, exact, upstream.double())]
            for a, b in zip(found, wanted):
                assert (a.double() - b).norm() < 3e-3 * b.norm(), length
        info = cudnn_mha.cache_info()
        builds, loads = builds + info.builds, loads + info.loads
        cudnn_mha.cache_clear()
    print(json.dumps([builds, loads]))
    """
)


def run(result: Path, **environment: str) -> tuple[dict[str, Any], list[Tensor]]:
    """What the script counted and computed, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(result)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), torch.load(result)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment to change; call `config.reload` after."""
    cudnn_mha.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    config.reload()
    cudnn_mha.cache_clear()


def test_the_second_process_builds_nothing_and_computes_the_same(tmp_path: Path) -> None:
    where = {config.CACHE_DIR: str(tmp_path / "plans"), config.RECORD: str(tmp_path / "calls")}
    first, wanted = run(tmp_path / "first", **where)
    assert (first["builds"], first["loads"]) == (6, 0)
    again, got = run(tmp_path / "again", **where)
    assert (again["builds"], again["loads"]) == (0, 6)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    assert len(recording.read([tmp_path / "calls"])) == 6


@pytest.fixture
def profile() -> str:
    """The profile that describes this GPU."""
    name = torch.cuda.get_device_name()
    same = [p for p in devices.profile_names() if devices.described(p).name == name]
    if not same:
        pytest.skip(f"no profile describes a {name}")
    return same[0]


def test_the_profile_says_what_cudnn_compares(profile: str) -> None:
    """A plan loads where these are what they were on the GPU that it was compiled for."""
    own = json.loads(runtime.library().create_device_properties(0).serialize())
    described = json.loads(devices.described(profile).properties)
    apart = {"pciDeviceId", "cudaDeviceId", "totalGlobalMem", "smClockRateKHz", "memClockRateKHz"}
    # Versions know keys of their own; a plan needs a driver at least as new as its profile's.
    compared = own.keys() & described.keys() - apart - {"driverVer", "deviceName"}
    assert {k: own[k] for k in compared} == {k: described[k] for k in compared}
    assert own["driverVer"] >= described["driverVer"]


def test_plans_compiled_without_a_gpu_run_here(tmp_path: Path, profile: str) -> None:
    calls = tmp_path / "calls"
    built, wanted = run(tmp_path / "built", **{config.RECORD: str(calls)})
    assert built["builds"] == 6
    outcomes = cudnn_mha.compile_ahead(recording.read([calls]), [profile], tmp_path / "plans")
    assert all(outcome.engine for outcome in outcomes) and len(outcomes) == 6
    found, got = run(tmp_path / "loaded", **{config.PLANS: str(tmp_path / "plans")})
    assert (found["builds"], found["loads"]) == (0, 6)
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-3 * b.double().norm()


def test_a_call_runs_elsewhere_while_its_plan_is_compiled(settings: pytest.MonkeyPatch) -> None:
    settings.setenv(config.BUILD, "background")
    config.reload()
    case = call_with_gradient(call(lengths=(104, 232)))
    leaves = case.leaves()
    before = time.monotonic()
    while cudnn_mha.cache_info().builds < 2:
        torch.autograd.grad(cudnn_sdpa(*leaves), leaves, case.grad_output)
        assert time.monotonic() < before + 60
    hits = cudnn_mha.cache_info().hits
    assert_right(case)
    assert cudnn_mha.cache_info().hits > hits and cudnn_mha.cache_info().builds <= 3


def test_never_compiles_nothing(settings: pytest.MonkeyPatch) -> None:
    settings.setenv(config.BUILD, "never")
    config.reload()
    case = call(lengths=(72, 232))
    with pytest.raises(cudnn_mha.CudnnSdpaUnsupportedError, match="not_compiled"):
        cudnn_sdpa(case.query, case.key, case.value, fallback=False)
    assert_right(case, fallback=True)
    assert cudnn_mha.cache_info().builds == 0


def test_warmup_makes_calls_ready(tmp_path: Path, settings: pytest.MonkeyPatch) -> None:
    case = call_with_gradient(call(lengths=(88, 96)))
    with cudnn_mha.record(tmp_path / "calls"):
        assert_right(case)
    cudnn_mha.cache_clear()
    outcomes = cudnn_mha.warmup(tmp_path / "calls")
    assert outcomes and all(outcome.engine for outcome in outcomes)
    builds = cudnn_mha.cache_info().builds
    settings.setenv(config.BUILD, "never")
    config.reload()
    assert_right(case)
    assert cudnn_mha.cache_info().builds == builds
    assert cache.plans.cache_info().misses > 0


def test_many_processes_share_a_folder_that_is_vandalized(tmp_path: Path) -> None:
    """Right values from plans that are evicted, torn, swapped and removed all the while."""
    folder = tmp_path / "plans"
    environment = {
        **os.environ,
        config.CACHE_DIR: str(folder),
        config.CACHE_BYTES: "1MiB",
        config.LENGTHS: "exact",
        "OMP_NUM_THREADS": "1",
    }
    folder.mkdir(mode=0o700)
    vandal = subprocess.Popen([sys.executable, "-c", VANDAL, folder], stdout=subprocess.DEVNULL)
    try:
        users = [
            subprocess.Popen(
                [sys.executable, "-c", HAMMER, str(seed)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for seed in range(PROCESSES)
        ]
        builds = loads = 0
        for user in users:
            out, err = user.communicate(timeout=300)
            assert user.returncode == 0, err
            counts = json.loads(out)
            builds, loads = builds + counts[0], loads + counts[1]
        assert vandal.poll() is None
    finally:
        vandal.kill()
        vandal.wait()
    print(f"{PROCESSES} processes: {builds} builds, {loads} loads")
    assert builds and loads


def test_autotuned_plans_are_right_and_kept(
    tmp_path: Path, settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.setenv(config.AUTOTUNE, "1")
    settings.setenv(config.LENGTHS, "exact")
    settings.setenv(config.CACHE_DIR, str(tmp_path))
    config.reload()
    caplog.set_level("INFO", "cudnn_mha")
    case = call_with_gradient(call(lengths=(616, 616), is_causal=True))
    assert_right(case)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("autotuned")]
    assert said and all("times as fast as the first" in line for line in said)
    assert cudnn_mha.cache_info().builds > 0
    cudnn_mha.cache_clear()
    assert_right(case)
    assert cudnn_mha.cache_info().builds == 0
