"""Plans made before they are needed: ahead of time for described GPUs, or at a start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import (
    cache,
    checks,
    config,
    devices,
    explain,
    lse_gradient,
    precompile,
    recording,
    runtime,
)
from cudnn_mha.cache import plan_key, plans
from cudnn_mha.config import DP_WORKSPACE_LIMIT, version_text
from cudnn_mha.inputs import Options
from cudnn_mha.precompile import Loaded, Outcome, compile_ahead, load_plans, specs_of, warmup
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.store import Entry, Store
from tests.support import BACKWARD, attention

H200 = devices.described("h200")
GPUS = ("h200", "b200", "a100-sxm-80gb")
FORWARD_SPEC = attention(lengths=(200, 72), causal=True, lse=True)
BACKWARD_SPEC = attention(BACKWARD, lengths=(200, 72), causal=True)
REFUSED_SPEC = attention(BACKWARD, dims=(512, 512))
SPECS = [FORWARD_SPEC, BACKWARD_SPEC, REFUSED_SPEC]


# --------------------------------------------------------------------------- the graphs of a call


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bshd(batch: int, heads: int, length: int, dim: int) -> Tensor:
    return meta(batch, length, heads, dim).transpose(1, 2)


PLAIN = (meta(2, 4, 200, 64),) * 3
GROUPS = (meta(2, 8, 200, 64), meta(2, 2, 333, 64), meta(2, 4, 333, 128))
PACKED = tuple(meta(2, 256, 3, 4, 64).permute(2, 0, 3, 1, 4))
CALLS: dict[str, tuple[tuple[Tensor, ...], Tensor | None, Options]] = {
    "plain": (PLAIN, None, Options()),
    "causal with log-sum-exp": (PLAIN, None, Options(is_causal=True, return_lse=True)),
    "groups": (GROUPS, None, Options(enable_gqa=True)),
    "lengths before heads": ((bshd(2, 4, 200, 64),) * 3, None, Options()),
    "packed": (PACKED, None, Options(is_causal=True)),
    "another head dimension of value": (
        (bshd(2, 4, 200, 64), bshd(2, 4, 128, 64), bshd(2, 4, 128, 32)),
        None,
        Options(),
    ),
    "without batch": ((meta(4, 200, 64),) * 3, None, Options()),
    "broadcast batch": ((meta(3, 4, 200, 64), *(meta(1, 4, 72, 64),) * 2), None, Options()),
    "odd head dimension": ((meta(2, 4, 200, 100),) * 3, None, Options()),
    "float16 and dropout": (
        (meta(2, 4, 200, 64, dtype=torch.float16),) * 3,
        None,
        Options(dropout_p=0.25),
    ),
    "scale": (PLAIN, None, Options(scale=0.5)),
    "negative scale": (PLAIN, None, Options(scale=-0.5)),
    "scale of 0": (PLAIN, None, Options(scale=0.0)),
    "deterministic": (PLAIN, None, Options(deterministic=True)),
    "boolean mask": (PLAIN, meta(2, 1, 1, 200, dtype=torch.bool), Options()),
    "mask of two dimensions": (PLAIN, meta(200, 200, dtype=torch.float32), Options()),
    "mask with a gradient": (
        PLAIN,
        meta(1, 4, 200, 200, dtype=torch.float32).requires_grad_(),
        Options(),
    ),
    "strides of no use": (
        tuple(meta(2, 4, 200, 67)[..., :64] for _ in range(3)),
        None,
        Options(),
    ),
    "a query that is repeated in memory": (
        (
            torch.empty_strided((3, 2, 1, 64), (64, 0, 192, 1), dtype=torch.half, device="meta"),
            *(meta(3, 2, 200, 64, dtype=torch.half),) * 2,
        ),
        None,
        Options(),
    ),
    "decode": ((meta(2, 4, 1, 64), *(meta(2, 4, 200, 64),) * 2), None, Options()),
}


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plans.cache_clear()
    monkeypatch.setattr(
        plans, "_build", lambda spec, *_: SimpleNamespace(spec=spec, engine="eng", workspace=0)
    )
    yield
    plans.cache_clear()


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CALLS)
def test_the_graphs_of_a_call_are_those_that_it_looks_up(
    tmp_path: Path, name: str, gradient: bool
) -> None:
    qkv, mask, options = CALLS[name]
    with recording.record(tmp_path / "calls.jsonl"):
        explanation = explain(
            *qkv,
            mask,
            options.dropout_p,
            options.is_causal,
            options.scale,
            options.enable_gqa,
            return_lse=options.return_lse,
            deterministic=options.deterministic,
            requires_grad=gradient,
            gpu="h200",
        )
    assert explanation.served
    found = specs_of(*qkv, mask, options, H200, gradient=gradient)
    noted = recording.read([tmp_path / "calls.jsonl"])
    if gradient and options.return_lse:  # it says, too, whether the log-sum-exp has a gradient
        assert noted.pop() == lse_gradient.widened(found[1])
    assert found == noted
    assert [spec.backward for spec in found] == [False, True][: 1 + gradient]


@pytest.mark.usefixtures("nothing_is_compiled")
def test_a_call_that_is_computed_in_parts_has_the_graphs_of_every_part(tmp_path: Path) -> None:
    q = meta(3 * checks.MAX_GRID + 1, 1, 8, 64)
    with recording.record(tmp_path / "calls.jsonl"):
        assert explain(q, q, q, gpu="h200").runs == "cuDNN, in 4 parts"
    found = specs_of(q, q, q, None, Options(), H200, gradient=False)
    assert sorted(spec.batch for spec in found) == [49151, 49152]
    assert set(recording.read([tmp_path / "calls.jsonl"])) <= set(found)


def test_a_call_that_cudnn_does_not_serve_has_its_graphs_all_the_same() -> None:
    """So that the refusal is reported."""
    q = meta(3 * checks.MAX_GRID, 1, 8, 512)
    found = specs_of(q, q, q, None, Options(), H200, gradient=True)
    assert [(spec.batch, spec.backward) for spec in found] == [
        (3 * checks.MAX_GRID, False),
        (3 * checks.MAX_GRID, True),
    ]


def test_calls_that_mean_nothing_are_errors() -> None:
    q = meta(2, 4, 128, 64)
    with pytest.raises(ValueError, match="for grouped-query attention set enable_gqa=True"):
        specs_of(q, meta(2, 3, 128, 64), q, None, Options(), H200, gradient=False)


# ------------------------------------------------------------------------------- ahead of time


Ahead = tuple[Path, list[Outcome], list[Outcome]]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Ahead:
    """A folder compiled for three generations of GPUs, the outcomes, and those of the progress."""
    folder = tmp_path_factory.mktemp("ahead") / "new" / "plans"
    seen: list[Outcome] = []
    outcomes = compile_ahead(iter(SPECS), GPUS, folder, jobs=2, progress=seen.append)
    return folder, outcomes, seen


def test_plans_for_three_generations_of_gpus(ahead: Ahead) -> None:
    folder, outcomes, seen = ahead
    assert [outcome.gpu for outcome in outcomes] == [gpu for gpu in GPUS for _ in SPECS]
    assert sorted(map(repr, seen)) == sorted(map(repr, outcomes))
    assert len(Store(folder).files()) == 6
    for outcome, (gpu, spec) in zip(
        outcomes, [(gpu, spec) for gpu in GPUS for spec in SPECS], strict=True
    ):
        device = devices.described(gpu)
        spec = checks.remedied(spec, device)
        assert outcome.spec == str(spec)
        entry = Store(folder).load(plan_key(spec, device, None).to_dict())
        if spec.dim_qk == 512:
            assert (outcome.engine, outcome.workspace, outcome.size) == (None, None, 0)
            assert outcome.seconds == 0
            (reason,) = outcome.reasons
            assert reason.endswith("got Dqk = 512, Dv = 512 [head_dim]")
            assert entry is None
            continue
        assert entry is not None
        assert (outcome.engine, outcome.workspace) == (entry.engine, entry.workspace)
        assert outcome.size == len(entry.to_bytes())
        assert outcome.seconds > 0
        assert outcome.reasons == ()


def test_the_calls_of_a_process_find_them(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", [])
    assert load_plans(ahead[0]).usable == 6
    plans.cache_clear()
    shapes = ((2, 4, 200, 64), (2, 4, 72, 64), (2, 4, 72, 64))
    for gpu in GPUS:
        explanation = explain(
            *shapes, is_causal=True, dtype=torch.float16, requires_grad=True, gpu=gpu
        )
        found = [(graph.engine, graph.workspace) for graph in explanation.graphs]
        assert found == [(o.engine, o.workspace) for o in ahead[1] if o.gpu == gpu and o.engine]
    info = plans.cache_info()
    assert (info.builds, info.loads) == (0, 6)
    plans.cache_clear()


def test_what_is_there_is_kept(ahead: Ahead) -> None:
    folder, outcomes, _ = ahead
    before = {path: facts.st_mtime_ns for path, facts in Store(folder).files()}
    again = compile_ahead(SPECS, GPUS[:1], folder, jobs=8)
    assert again == [dataclasses.replace(o, seconds=0.0) for o in outcomes[: len(SPECS)]]
    assert {path: facts.st_mtime_ns for path, facts in Store(folder).files()} == before


def compile_into(spec: AttentionSpec, folder: Path, workspace_limit: int | None = None) -> Outcome:
    return precompile._compile_into(spec, "h200", str(folder), workspace_limit)


def test_refusals_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compile_into(BACKWARD_SPEC, tmp_path, 1)
    (reason,) = outcome.reasons
    assert reason.startswith("every plan needs more workspace than workspace_limit = 1 bytes")
    assert reason.endswith("[workspace_limit]")
    assert outcome.engine is None
    assert outcome.seconds > 0
    (found,) = Store(tmp_path).inspect()
    assert found.entry is not None
    assert str(found.entry.refusal) == reason

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(precompile, "compile_plan", never)
    assert compile_into(BACKWARD_SPEC, tmp_path, 1) == dataclasses.replace(outcome, seconds=0.0)


def test_an_error_costs_one_graph_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR\n  in nvrtc")

    monkeypatch.setattr(precompile, "compile_plan", broken)
    outcome = compile_into(FORWARD_SPEC, tmp_path)
    assert outcome.reasons == ("RuntimeError: CUDNN_STATUS_INTERNAL_ERROR in nvrtc",)
    assert outcome.engine is None
    assert Store(tmp_path).files() == []


@pytest.mark.parametrize("content", [b"garbage", None])
def test_a_file_of_no_use_is_replaced(tmp_path: Path, content: bytes | None) -> None:
    store = Store(tmp_path)
    key = plan_key(FORWARD_SPEC, H200, None).to_dict()
    store.save(Entry(key, "eng", 1))
    store.path(key).write_bytes(content or store.path(key).read_bytes()[:-1])
    assert compile_into(FORWARD_SPEC, tmp_path).seconds > 0
    entry = store.load(key)
    assert entry is not None
    assert entry.blob


def test_nothing_starts_for_an_unknown_gpu_or_a_folder_of_no_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpu must be one of a10, .*, got 'h300'"):
        compile_ahead(SPECS, ["h200", "h300"], tmp_path / "plans")
    assert not (tmp_path / "plans").exists()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        compile_ahead(SPECS, ["h200"], tmp_path / "file")
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by other users"):
        compile_ahead(SPECS, ["h200"], tmp_path)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "recording.jsonl").write_text(json.dumps(REFUSED_SPEC.to_dict()))
    script = tmp_path / "script.py"
    script.write_text("""
import sys, time
from cudnn_mha import compile_ahead, recording

def wait(outcome):
    print("at work", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    compile_ahead(recording.read(sys.argv[1:2]), ["h200"], sys.argv[2], progress=wait)
""")
    arguments = [str(tmp_path / "recording.jsonl"), str(tmp_path / "plans")]
    environment = os.environ | {"PYTHONPATH": str(Path(precompile.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "at work\n"
            parent.kill()
            # Every worker holds the other end of the pipe, so this returns once all are gone.
            assert parent.communicate(timeout=8)[0] == ""
            assert parent.returncode == -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


def test_nothing_to_compile_is_nothing(tmp_path: Path) -> None:
    assert compile_ahead([], ["h200"], tmp_path) == []


def test_the_same_graph_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of several GPUs have it with the remedy and without."""
    given: list[Any] = []

    def all_(pool: object, work: object, tasks: list[Any], progress: object) -> list[Outcome]:
        given.extend(tasks)
        return []

    monkeypatch.setattr(precompile, "_all", all_)
    padded = dataclasses.replace(BACKWARD_SPEC, padding=True)
    compile_ahead([BACKWARD_SPEC, padded, BACKWARD_SPEC], ["h200", "a10"], tmp_path)
    assert [(spec, gpu) for spec, gpu, *_ in given] == [
        (padded, "h200"),
        (BACKWARD_SPEC, "a10"),
        (padded, "a10"),
    ]


def test_a_failure_ends_the_rest() -> None:
    done: list[int] = []

    def work(number: int) -> Outcome:
        done.append(number)
        if number == 1:
            raise OSError("disk full")
        time.sleep(0.02)
        return Outcome(str(number), "")

    with ThreadPoolExecutor(1) as pool:
        assert [o.gpu for o in precompile._all(pool, work, [(3,), (2,)], None)] == ["3", "2"]
    done.clear()
    with ThreadPoolExecutor(1) as pool, pytest.raises(OSError, match="disk full"):
        precompile._all(pool, work, [(number,) for number in range(100)], None)
    assert len(done) < 10


# ----------------------------------------------------------------------------- what is of use here


def entries(store: Store, count: int = 1, **fields: Any) -> None:
    key = plan_key(FORWARD_SPEC, H200, None).to_dict() | fields
    for _ in range(count):
        store.save(Entry(key | {"workspace_limit": len(store.files())}, "eng", 0))


def test_a_folder_s_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", [])
    store = Store(tmp_path)
    b200 = plan_key(FORWARD_SPEC, devices.described("b200"), None).to_dict()["gpu"]
    entries(store, 3)
    entries(store, 2, gpu=b200)
    entries(store, 2, cudnn="9.1.0")
    entries(store, cudnn="9.1.0", frontend="1.0.0")
    entries(store, environment=["7"])
    (tmp_path / "ab").mkdir(exist_ok=True)
    (tmp_path / "ab" / "cd.plan").write_bytes(b"garbage")

    here = version_text(runtime.cudnn_version())
    skipped = {
        f"for cudnn 9.1.0, here is {here}": 2,
        f"for cudnn 9.1.0, here is {here}; frontend 1.0.0, here is {runtime.frontend_version()}": 1,
        f"for environment ['7'], here is {[*runtime.plan_environment()]}": 1,
        "it is no plan of cudnn_mha": 1,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(DP_WORKSPACE_LIMIT, raising=False)
    assert load_plans(tmp_path) == Loaded(str(tmp_path), 5, skipped)

    card = dataclasses.replace(H200, index=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "cuda", lambda index: card)
    cards = "for NVIDIA B200 with 148 multiprocessors, here is NVIDIA H200 with 132 multiprocessors"
    assert load_plans(str(tmp_path)) == Loaded(str(tmp_path), 3, skipped | {cards: 2})
    assert len(cache._loaded) == 1

    lines = str(load_plans(tmp_path)).splitlines()
    assert lines[0] == f"{tmp_path}: 3 usable, 7 skipped"
    assert f"  2 {cards}" in lines
    assert len(lines) == 6


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cudnn-mha compile --out .*nothing"):
        load_plans(tmp_path / "nothing")


def test_loading_makes_calls_look_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", [])
    heard: list[str] = []
    plans.on_drop(lambda: heard.append("dropped"))
    load_plans(tmp_path)
    plans._listeners.pop()
    assert heard == ["dropped"]


# ----------------------------------------------------------------------------------- at a start


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU, as far as compiling for it goes."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "cuda", lambda index: devices.described(GPUS[index]))
    plans.cache_clear()
    yield
    plans.cache_clear()
    monkeypatch.undo()
    config.reload()


@pytest.mark.usefixtures("card")
def test_warming_up_makes_the_plans_of_a_recording_ready(tmp_path: Path) -> None:
    recorder = recording.Recorder(tmp_path / "calls.jsonl")
    for spec in SPECS:
        recorder.note(spec)
    seen: list[Outcome] = []
    outcomes = warmup(tmp_path / "calls.jsonl", jobs=2, progress=seen.append)
    assert sorted(map(repr, seen)) == sorted(map(repr, outcomes))
    assert [outcome.engine is None for outcome in outcomes] == [False, False, True]
    assert outcomes[2].reasons[0].endswith("[head_dim]")
    assert outcomes[1].spec == str(checks.remedied(BACKWARD_SPEC, H200))
    assert outcomes[1].spec != str(BACKWARD_SPEC)
    assert {outcome.gpu for outcome in outcomes} == {"NVIDIA H200"}
    assert plans.cache_info()[1:3] == (2, 2)
    shapes = ((2, 4, 200, 64), (2, 4, 72, 64), (2, 4, 72, 64))
    explain(*shapes, is_causal=True, dtype=torch.float16, requires_grad=True, gpu="h200")
    assert plans.cache_info()[1:3] == (2, 2)
    assert warmup(SPECS[:1])[0].engine == outcomes[0].engine
    assert plans.cache_info().builds == 2


@pytest.mark.usefixtures("card")
def test_warming_up_for_another_gpu_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    (outcome,) = warmup([BACKWARD_SPEC], device=2, workspace_limit="1kB")
    assert outcome.gpu == "NVIDIA A100-SXM4-80GB"
    assert "workspace_limit = 1000 bytes" in outcome.reasons[0]
    monkeypatch.setenv(config.WORKSPACE_LIMIT, "2kB")
    config.reload()
    (outcome,) = warmup([BACKWARD_SPEC], device=2)
    assert "workspace_limit = 2000 bytes" in outcome.reasons[0]
    assert plans.cache_info()[2:5] == (0, 0, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_warming_up_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="NVIDIA"):
        warmup([FORWARD_SPEC])


def test_cores_are_those_that_the_process_may_use() -> None:
    assert precompile._cores() == len(os.sched_getaffinity(0))
