"""The doctor: every conflict judged from made-up facts, and one look at this machine."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cudnn_mha import config, doctor, driver_stub
from cudnn_mha.backend import Status
from cudnn_mha.doctor import Facts, Finding, Gpu, Library, Place, Versions
from tests.support import run

KNOWN = ("TORCH_CUDNN_MHA_CACHE_SIZE", "TORCH_CUDNN_MHA_DISABLED")
SITE = "/env/lib/python3.12/site-packages"
CUDNN = f"{SITE}/nvidia/cudnn/lib"
CUDA = f"{SITE}/nvidia/cu13/lib"

LIBRARIES = (
    Library(f"{CUDA}/libcublasLt.so.13", loaded=True),
    Library(f"{CUDA}/libnvrtc.so.13", loaded=True),
    Library(f"{CUDNN}/libcudnn.so.9", loaded=True),
    Library(f"{CUDNN}/libcudnn_engines_runtime_compiled.so.9"),
    Library(f"{CUDNN}/libcudnn_graph.so.9", loaded=True),
    Library(f"{CUDNN}/libcudnn_heuristic.so.9"),
)
HEALTHY = Facts(
    versions=Versions(
        python="3.12.1",
        platform="Linux",
        cudnn_mha="0.1.0",
        torch="2.14.1+cu130",
        torch_cuda="13.0",
        frontend="1.32.0",
        torch_cudnn=92400,
        frontend_cudnn=92400,
        cudnn_cuda="13.3",
    ),
    libraries=LIBRARIES,
    distributions={"nvidia-cudnn-cu13": "9.24.0.43"},
    driver="13.0",
    gpus=(Gpu(0, "NVIDIA H200", 90, 150_000_000_000),),
    sdp_enabled=True,
    drop_in=Status(
        enabled=False,
        why="nobody asked for it",
        provider="PyTorch",
        priority=("FLASH_ATTENTION", "CUDNN_ATTENTION"),
        served=0,
        served_backward=0,
        fallbacks=0,
        reasons={},
    ),
    places=(Place(config.CACHE_DIR, "/home/me/.cache/cudnn_mha"),),
)

REINSTALL_CUDNN = "pip install --force-reinstall --no-deps 'nvidia-cudnn-cu13==9.24.0.43'"
REINSTALL_TORCH = "pip install --force-reinstall torch==2.14.1"


def facts(**changes: Any) -> Facts:
    """The healthy facts with changes, among them to single versions."""
    names = {field.name for field in dataclasses.fields(Versions)}
    changed = {name: changes.pop(name) for name in list(changes) if name in names}
    versions = dataclasses.replace(HEALTHY.versions, **changed)
    return dataclasses.replace(HEALTHY, versions=versions, **changes)


def troubles(**changes: Any) -> list[Finding]:
    """What is not ok about the healthy facts with changes."""
    return [f for f in doctor.findings(facts(**changes), KNOWN) if f.level != "ok"]


def trouble(**changes: Any) -> Finding:
    (found,) = troubles(**changes)
    return found


def test_healthy() -> None:
    assert doctor.findings(HEALTHY, KNOWN) == [
        Finding("ok", "torch", "2.14.1+cu130, CUDA 13.0"),
        Finding("ok", "cuDNN frontend", "1.32.0"),
        Finding("ok", "cuDNN", "9.24.0, CUDA 13.3"),
        Finding("ok", "libraries", f"one cuDNN, from {CUDNN}"),
        Finding("ok", "driver", "supports CUDA 13.0"),
        Finding("ok", "GPU", "0: NVIDIA H200, sm_90, 140 GiB"),
        Finding("ok", "switches", "nothing turns cuDNN attention off"),
        Finding(
            "ok",
            "drop-in",
            "off (nobody asked for it): torch's cuDNN attention is served by PyTorch; "
            "cudnn_mha.enable(), or TORCH_CUDNN_MHA_ENABLED=1 from the start, switches it on",
        ),
        Finding("ok", "plans on disk", "compiled plans are kept in /home/me/.cache/cudnn_mha"),
    ]


def test_torch_missing() -> None:
    found = trouble(
        torch=None,
        torch_cuda=None,
        torch_cudnn=None,
        sdp_enabled=None,
        errors={"torch": "ModuleNotFoundError: No module named 'torch'"},
    )
    assert found == Finding(
        "fail",
        "torch",
        "cannot be imported (ModuleNotFoundError: No module named 'torch')",
        "pip install torch",
    )


def test_torch_without_cuda() -> None:
    found = trouble(torch="2.14.1+cpu", torch_cuda=None, torch_cudnn=None)
    assert (found.level, found.subject) == ("fail", "torch")
    assert "2.14.1+cpu is built without CUDA" in found.message
    assert found.remedy == REINSTALL_TORCH


def test_frontend_missing() -> None:
    found = trouble(
        frontend=None, frontend_cudnn=None, errors={"frontend": "ImportError: no cudnn"}
    )
    assert found == Finding(
        "fail",
        "cuDNN frontend",
        "cannot be imported (ImportError: no cudnn)",
        "pip install -U 'nvidia-cudnn-frontend>=1.28'",
    )


@pytest.mark.parametrize(
    ("version", "too_old"),
    [("1.9.0", True), ("1.27.1", True), ("1.28.0", False), ("1.32.0rc1", False), ("2.0", False)],
)
def test_frontend_age(version: str, too_old: bool) -> None:
    found = troubles(frontend=version)
    messages = [f"{version} is too old, 1.28 is needed"] if too_old else []
    assert [f.message for f in found] == messages
    assert all((f.level, f.subject) == ("fail", "cuDNN frontend") for f in found)


def test_cudnn_missing() -> None:
    found = trouble(
        frontend_cudnn=None,
        torch_cudnn=None,
        cudnn_cuda=None,
        libraries=LIBRARIES[:2],
        distributions={},
        errors={"frontend's cuDNN": "RuntimeError: libcudnn.so.9 not found"},
    )
    assert found == Finding(
        "fail",
        "cuDNN",
        "cannot be loaded (RuntimeError: libcudnn.so.9 not found)",
        "pip install --force-reinstall --no-deps 'nvidia-cudnn-cu13'",
    )


def test_cudnn_too_old() -> None:
    found = trouble(frontend_cudnn=91002, torch_cudnn=91002)
    assert found.message == "9.10.2 is too old, 9.19.0 is needed"
    assert found.remedy == "pip install --force-reinstall --no-deps 'nvidia-cudnn-cu13>=9.19.0'"


def test_frontend_and_torch_use_different_cudnn() -> None:
    found = trouble(frontend_cudnn=92700)
    assert found == Finding(
        "fail", "cuDNN", "the frontend uses 9.27.0, torch uses 9.24.0", REINSTALL_CUDNN
    )


def test_torch_refuses_cudnn() -> None:
    reason = "RuntimeError: cuDNN version incompatibility"
    found = trouble(torch_cudnn=None, errors={"torch's cuDNN": reason})
    assert found == Finding("fail", "cuDNN", f"torch refuses it ({reason})", REINSTALL_CUDNN)


def test_cudnn_for_another_cuda() -> None:
    found = trouble(cudnn_cuda="12.9", distributions={"nvidia-cudnn-cu12": "9.24.0.43"})
    assert found == Finding(
        "fail",
        "cuDNN",
        "is built for CUDA 12, torch for CUDA 13",
        "pip uninstall -y nvidia-cudnn-cu12 && "
        "pip install --force-reinstall --no-deps 'nvidia-cudnn-cu13'",
    )


@pytest.mark.parametrize("other", ["nvidia-cudnn-cu12", "nvidia-cudnn-jit-cu12"])
def test_cudnn_of_two_cudas_installed(other: str) -> None:
    found = trouble(distributions={other: "9.20.0.48", "nvidia-cudnn-cu13": "9.24.0.43"})
    assert (found.level, found.subject) == ("fail", "libraries")
    assert found.message.startswith(f"{other} and nvidia-cudnn-cu13 are for different versions")
    assert found.remedy == f"pip uninstall -y {other} && {REINSTALL_CUDNN}"


def test_both_kinds_of_cudnn_for_one_cuda_are_no_conflict() -> None:
    both = {"nvidia-cudnn-cu13": "9.24.0.43", "nvidia-cudnn-jit-cu13": "9.24.0.43"}
    assert troubles(distributions=both) == []


def test_parts_of_two_cudnn_loaded() -> None:
    system = "/usr/lib/x86_64-linux-gnu"
    mixed = (
        *LIBRARIES[:4],
        Library(f"{CUDNN}/libcudnn_graph.so.9"),
        Library(f"{CUDNN}/libcudnn_heuristic.so.9"),
        Library(f"{system}/libcudnn_engines_runtime_compiled.so.9.23.0"),
        Library(f"{system}/libcudnn_graph.so.9.23.0", loaded=True),
        Library(f"{system}/libcudnn_heuristic.so.9.23.0"),
    )
    found = trouble(libraries=mixed)
    assert found == Finding(
        "fail",
        "libraries",
        f"libcudnn is loaded from several directories: {CUDNN}, {system}",
        REINSTALL_CUDNN,
    )


@pytest.mark.parametrize("name", ["libnvrtc.so.13", "libcublasLt.so.13"])
def test_cuda_libraries_of_two_directories_loaded(name: str) -> None:
    found = trouble(libraries=(*LIBRARIES, Library(f"/usr/local/cuda/lib64/{name}", loaded=True)))
    assert (found.level, found.subject) == ("fail", "libraries")
    family = name.split(".")[0]
    assert found.message.startswith(f"{family} is loaded from several directories: {CUDA}, /usr")
    assert found.remedy == REINSTALL_TORCH


def test_search_path_is_the_remedy_where_it_is_the_cause() -> None:
    found = trouble(
        libraries=(*LIBRARIES, Library("/opt/cuda/libnvrtc.so.13", loaded=True)),
        variables={"LD_LIBRARY_PATH": ":/opt/cuda:/opt/other"},
    )
    assert found.remedy == "take /opt/cuda out of LD_LIBRARY_PATH"


def test_cudnn_lacks_a_part() -> None:
    found = trouble(libraries=(*LIBRARIES[:3], *LIBRARIES[4:]))
    assert found == Finding(
        "fail",
        "libraries",
        f"the cuDNN in {CUDNN} lacks libcudnn_engines_runtime_compiled",
        REINSTALL_CUDNN,
    )


def test_second_cudnn_on_disk() -> None:
    found = trouble(libraries=(*LIBRARIES, Library("/usr/lib/libcudnn_ops.so.9.23.0")))
    assert (found.level, found.subject) == ("warn", "libraries")
    assert found.message.startswith("another cuDNN lies unused in /usr/lib;")


def test_second_nvrtc_on_disk_is_no_trouble() -> None:
    assert troubles(libraries=(*LIBRARIES, Library("/usr/local/cuda/lib64/libnvrtc.so.12"))) == []


@pytest.mark.parametrize("name", ["libnvrtc.so.13", "libcublasLt.so.13"])
def test_library_that_cannot_be_loaded(name: str) -> None:
    found = trouble(unloadable={name: "OSError: no such file"})
    assert found == Finding(
        "fail",
        "libraries",
        f"{name}, without which cuDNN cannot compile, cannot be loaded (OSError: no such file)",
        REINSTALL_TORCH,
    )


def test_no_driver() -> None:
    found = trouble(driver=None, gpus=())
    assert found == Finding(
        "warn",
        "driver",
        "there is no NVIDIA driver; planning for described GPUs still works",
        "to compute, install an NVIDIA driver for CUDA 13.0; in a container pass --gpus all",
    )


@pytest.mark.parametrize(
    ("driver", "variables", "remedy"),
    [
        ("13.0", {}, "run nvidia-smi to see"),
        ("12.4", {}, "update the NVIDIA driver to one for CUDA 13.0 (it supports 12.4)"),
        ("13.0", {"CUDA_VISIBLE_DEVICES": ""}, "unset CUDA_VISIBLE_DEVICES (now '')"),
    ],
)
def test_driver_without_gpu(driver: str, variables: dict[str, str], remedy: str) -> None:
    found = trouble(driver=driver, gpus=(), variables=variables)
    assert (found.level, found.subject) == ("warn", "GPU")
    assert "planning for described GPUs still works" in found.message
    assert found.remedy is not None
    assert found.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("gpus", "levels"),
    [
        ([75], ["fail"]),
        ([80], ["ok"]),
        ([75, 120], ["warn", "ok"]),
        ([70, 75], ["fail", "fail"]),
    ],
)
def test_gpu_generation(gpus: list[int], levels: list[str]) -> None:
    cards = tuple(Gpu(index, "GPU", sm, 2**34) for index, sm in enumerate(gpus))
    found = [f for f in doctor.findings(facts(gpus=cards), KNOWN) if f.subject == "GPU"]
    assert [f.level for f in found] == levels
    assert [f.message.split(";")[0] for f in found] == [
        f"{index}: GPU, sm_{sm}, 16 GiB" for index, sm in enumerate(gpus)
    ]


@pytest.mark.parametrize("value", ["1", "true", "Yes "])
def test_switched_off(value: str) -> None:
    found = trouble(variables={"TORCH_CUDNN_MHA_DISABLED": value})
    assert found == Finding(
        "warn",
        "switches",
        "TORCH_CUDNN_MHA_DISABLED keeps cuDNN out of every call",
        "unset TORCH_CUDNN_MHA_DISABLED",
    )


@pytest.mark.parametrize("value", ["", "0", "false", "off"])
def test_not_switched_off(value: str) -> None:
    assert troubles(variables={"TORCH_CUDNN_MHA_DISABLED": value}) == []


def test_a_value_that_means_nothing() -> None:
    error = "ValueError: TORCH_CUDNN_MHA_CACHE_SIZE must be a whole number of at least 1, got 'x'"
    found = trouble(errors={"settings": error})
    assert found == Finding("fail", "switches", error, "mend or unset TORCH_CUDNN_MHA_CACHE_SIZE")


def test_collect_parses_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_MHA_WORKSPACE_LIMIT", "plenty")
    report = doctor.collect()
    assert report.failed
    assert "must be a number of bytes" in report.facts.errors["settings"]
    monkeypatch.undo()
    config.reload()


def test_torchs_switch_is_off() -> None:
    found = trouble(sdp_enabled=False)
    assert found.level == "warn"
    assert found.remedy == "torch.backends.cuda.enable_cudnn_sdp(True)"


def drop_in(
    enabled: bool, why: str, provider: str, variables: dict[str, str] | None = None
) -> Finding:
    """The judgement on who serves torch's cuDNN attention."""
    assert HEALTHY.drop_in is not None
    state = dataclasses.replace(HEALTHY.drop_in, enabled=enabled, why=why, provider=provider)
    changed = facts(drop_in=state, variables=variables or {})
    (found,) = (f for f in doctor.findings(changed) if f.subject == "drop-in")
    return found


def test_the_drop_in_is_on() -> None:
    assert drop_in(True, "enable() was called", "cudnn_mha") == Finding(
        "ok",
        "drop-in",
        "on (enable() was called): torch's cuDNN attention is served by cudnn_mha; "
        "cudnn_mha.disable(), or TORCH_CUDNN_MHA_ENABLED=0 from the start, switches it off",
    )


@pytest.mark.parametrize(
    ("enabled", "remedy"),
    [
        (False, "cudnn_mha.enable(), after that package's import, takes its place"),
        (True, "cudnn_mha.disable() and cudnn_mha.enable() again take its place"),
    ],
)
def test_another_package_serves_torchs_cudnn_attention(enabled: bool, remedy: str) -> None:
    found = drop_in(enabled, "it is so", "/other/kernels.py:7", {config.ENABLED: "1"})
    assert found == Finding(
        "warn",
        "drop-in",
        f"{'on' if enabled else 'off'} (it is so): torch's cuDNN attention is served by "
        "/other/kernels.py:7, another package",
        remedy,
    )


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({}, "cudnn_mha.enable() switches it on, or says what stands in the way"),
        (
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD, which keeps torch from loading it",
        ),
    ],
)
def test_the_drop_in_is_off_although_its_variable_is_set(
    variables: dict[str, str], remedy: str
) -> None:
    found = drop_in(False, "it is so", "PyTorch", {config.ENABLED: "1", **variables})
    assert found == Finding(
        "warn",
        "drop-in",
        "off although TORCH_CUDNN_MHA_ENABLED is set (it is so): "
        "torch's cuDNN attention is served by PyTorch",
        remedy,
    )


@pytest.mark.parametrize("provider", ["PyTorch", "nobody"])
@pytest.mark.parametrize("enabled", ["0", "1"])
def test_a_drop_in_that_is_kept_off_is_no_trouble(enabled: str, provider: str) -> None:
    variables = {config.ENABLED: enabled, config.DISABLED: "1"}
    assert drop_in(False, "it is so", provider, variables) == Finding(
        "ok", "drop-in", f"off (it is so): torch's cuDNN attention is served by {provider}"
    )


@pytest.mark.parametrize("value", ["0", "1"])
def test_doctor_tells_of_the_drop_in(value: str) -> None:
    variables = {name: text for name, text in os.environ.items() if name not in config.VARIABLES}
    command = [sys.executable, "-m", "cudnn_mha", "doctor"]

    def run(*options: str) -> str:
        return subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            check=False,
            env=variables | {config.ENABLED: value},
        ).stdout

    found = json.loads(run("--json"))
    state = found["facts"]["drop_in"]
    (finding,) = (f for f in found["findings"] if f["subject"] == "drop-in")
    assert finding["level"] == "ok"
    assert finding["message"].startswith(f"{'on' if state['enabled'] else 'off'} ({state['why']})")
    expected = {"0": (False, "PyTorch"), "1": (True, "cudnn_mha")}[value]
    assert (state["enabled"], state["provider"]) == expected
    lines = run().splitlines()
    assert f"ok   drop-in: {finding['message']}" in lines
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert ["cudnn_mha.status().enabled", "on" if expected[0] else "off"] in cells
    assert ["cudnn_mha.status().provider", expected[1]] in cells


def test_a_drop_in_that_cannot_be_asked_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn_mha.backend", None)
    monkeypatch.delattr("cudnn_mha.backend")  # which `from cudnn_mha import` looks at first
    report = doctor.collect()
    assert report.facts.drop_in is None
    assert "cudnn_mha.backend" in report.facts.errors["drop-in"]
    assert [f for f in report.findings if f.subject == "drop-in"] == []


def places(monkeypatch: pytest.MonkeyPatch, **variables: object) -> list[Finding]:
    """The judgement on the folders of an environment with these variables of ours."""
    for name in (config.CACHE_DIR, config.PLANS, config.RECORD):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(getattr(config, name), str(value))
    try:
        report = doctor.collect()
    finally:
        config.settings.cache_clear()
    assert "plans on disk" not in report.facts.errors
    return [finding for finding in report.findings if finding.subject == "plans on disk"]


@pytest.fixture
def no_settings_stay() -> Iterator[None]:
    yield
    config.reload()


@pytest.mark.usefixtures("no_settings_stay")
def test_folders_that_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    kept = f"compiled plans are kept in {tmp_path / 'home' / 'cudnn_mha'}"
    assert places(monkeypatch) == [Finding("ok", "plans on disk", kept)]
    assert places(monkeypatch, CACHE_DIR="off") == [
        Finding("ok", "plans on disk", f"compiled plans are not kept: {config.CACHE_DIR} is off")
    ]
    (tmp_path / "plans").mkdir(mode=0o755)
    (tmp_path / "there.jsonl").touch()
    for record in (tmp_path / "new" / "calls.jsonl", tmp_path / "there.jsonl", tmp_path):
        found = places(
            monkeypatch, CACHE_DIR=tmp_path / "a" / "b", PLANS=tmp_path / "plans", RECORD=record
        )
        assert found == [
            Finding("ok", "plans on disk", f"compiled plans are kept in {tmp_path / 'a' / 'b'}"),
            Finding(
                "ok",
                "plans on disk",
                f"plans compiled ahead of time are read from {tmp_path / 'plans'}",
            ),
            Finding("ok", "plans on disk", f"calls are recorded in {record}"),
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plans", "there.jsonl"]


@pytest.mark.usefixtures("no_settings_stay")
def test_folders_of_no_use_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shared, missing = tmp_path / "file", tmp_path / "shared", tmp_path / "not there"
    file.touch()
    shared.mkdir()
    shared.chmod(0o775)
    writable = (
        f"{shared} can be written by other users, and a plan is native code; "
        f"`chmod -R go-w {shared}`"
    )
    found = places(
        monkeypatch, CACHE_DIR=shared, PLANS=f"{file}:{shared}:{missing}", RECORD=file / "x" / "y"
    )
    assert [(f.level, f.message) for f in found] == [
        ("warn", f"{config.CACHE_DIR} is of no use: {writable}"),
        ("warn", f"{config.PLANS} is of no use: {file} is no folder"),
        ("warn", f"{config.PLANS} is of no use: {writable}"),
        ("warn", f"{config.PLANS} is of no use: {missing} does not exist"),
        ("warn", f"{config.RECORD} is of no use: {file / 'x'} cannot be made: {file} is no folder"),
    ]
    assert found[0].remedy == (
        f"set {config.CACHE_DIR} to a folder that you alone can write, or to off"
    )
    assert found[3].remedy == (
        f"take it out of {config.PLANS}, or fill a folder of your own with "
        f"`cudnn-mha compile --out '{missing}'`"
    )
    assert found[4].remedy == (
        f"set {config.RECORD} to a file or folder that you can write, or unset it"
    )
    cached, *_ = places(monkeypatch, CACHE_DIR=file / "plans")
    assert (cached.level, cached.message.split(":")[0]) == (
        "warn",
        f"{config.CACHE_DIR} is of no use",
    )


@pytest.mark.usefixtures("no_settings_stay")
def test_what_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "calls.jsonl"
    file.touch()
    access = os.access

    def read_only(path: Any, wanted: int, **named: Any) -> bool:
        inside = str(path).startswith(str(tmp_path))
        return access(path, wanted, **named) and not (inside and wanted & os.W_OK)

    monkeypatch.setattr(os, "access", read_only)
    for cache, record, words in (
        (
            tmp_path / "new",
            file,
            (
                f"{tmp_path / 'new'} cannot be made: {tmp_path} cannot be written by this user",
                f"{file} cannot be written by this user",
            ),
        ),
        (
            tmp_path,
            f"{tmp_path}/",
            (f"{tmp_path} cannot be written by this user",) * 2,
        ),
    ):
        found = places(monkeypatch, CACHE_DIR=cache, RECORD=record)
        assert [(f.level, f.message) for f in found] == [
            ("warn", f"{name} is of no use: {text}")
            for name, text in zip((config.CACHE_DIR, config.RECORD), words, strict=True)
        ]


def test_a_switch_that_the_user_set_is_no_fault() -> None:
    report = doctor.Report(HEALTHY, tuple(troubles(variables={config.DISABLED: "1"})))
    assert [finding.level for finding in report.findings] == ["warn"]
    assert not report.failed
    text = " ".join(run("doctor", "--help").stdout.split())
    assert (
        "A missing GPU is no fault, nor is a switch that you set, such as "
        "TORCH_CUDNN_MHA_DISABLED: both are warnings."
    ) in text


def test_unknown_variable() -> None:
    found = trouble(
        variables={"TORCH_CUDNN_MHA_DISABLE": "1", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    )
    assert found == Finding(
        "warn",
        "switches",
        "TORCH_CUDNN_MHA_DISABLE means nothing; known are TORCH_CUDNN_MHA_CACHE_SIZE, "
        "TORCH_CUDNN_MHA_DISABLED",
        "unset TORCH_CUDNN_MHA_DISABLE",
    )


def test_several_troubles_are_all_reported() -> None:
    found = troubles(frontend="1.20.0", frontend_cudnn=92700, sdp_enabled=False, driver=None)
    assert [(f.level, f.subject) for f in found] == [
        ("fail", "cuDNN frontend"),
        ("fail", "cuDNN"),
        ("warn", "driver"),
        ("warn", "switches"),
    ]


@pytest.mark.parametrize(("level", "failed"), [("ok", False), ("warn", False), ("fail", True)])
def test_report_fails_with_its_findings(level: doctor.Level, failed: bool) -> None:
    report = doctor.Report(HEALTHY, (Finding("ok", "a", "b"), Finding(level, "c", "d", "e")))
    assert report.failed is failed
    found = json.loads(json.dumps(report.to_dict()))
    assert found["failed"] is failed
    assert found["findings"][1] == {
        "level": level,
        "subject": "c",
        "message": "d",
        "remedy": "e",
    }
    assert found["facts"]["gpus"] == [
        {"index": 0, "name": "NVIDIA H200", "sm": 90, "memory": 150_000_000_000}
    ]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("libcudnn.so", "cudnn"),
        ("libcudnn.so.9", "cudnn"),
        ("libcudnn_engines_tensor_ir.so.9.24.0", "cudnn"),
        ("libnvrtc.alt.so.13", "nvrtc"),
        ("libnvrtc-builtins.so.13.0", "nvrtc"),
        ("libcublasLt.so.13", "cublasLt"),
        ("libcublas.so.13", ""),
        ("libcudnnx.so.9", ""),
        ("libcudnn.so.9 (deleted)", ""),
    ],
)
def test_library_family(name: str, family: str) -> None:
    assert Library(f"/lib/{name}").family == family


def test_collect_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("TORCH_CUDNN_MHA_TYPO", "1")
    report = doctor.collect()
    found = json.loads(json.dumps(report.to_dict()))

    versions = found["facts"]["versions"]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["torch"] == torch.__version__
    assert versions["torch_cuda"] == torch.version.cuda
    assert versions["torch_cudnn"] == torch.backends.cudnn.version()
    assert found["facts"]["variables"]["TORCH_CUDNN_MHA_TYPO"] == "1"
    assert (found["facts"]["driver"] is not None) == driver_stub.driver_present()
    assert len(found["facts"]["gpus"]) == torch.cuda.device_count()
    assert any(
        f["level"] == "warn" and f["remedy"] == "unset TORCH_CUDNN_MHA_TYPO"
        for f in found["findings"]
    )
    if importlib.util.find_spec("cudnn"):
        cudnn = importlib.import_module("cudnn")
        assert versions["frontend"] == cudnn.__version__
        assert versions["frontend_cudnn"] == cudnn.backend_version()
        loaded = {Path(f["path"]).name for f in found["facts"]["libraries"] if f["loaded"]}
        assert any(name.startswith("libcudnn.so") for name in loaded)


def test_collect_without_torch_and_frontend() -> None:
    code = """
import json, sys
sys.modules["torch"] = sys.modules["cudnn"] = None
from cudnn_mha import doctor
print(json.dumps(doctor.collect(()).to_dict()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    found = json.loads(done.stdout)
    assert found["failed"] is True
    assert found["facts"]["versions"]["torch"] is None
    assert found["facts"]["versions"]["frontend"] is None
    (place,) = found["facts"]["places"]
    assert place == {"variable": config.CACHE_DIR, "path": None, "problem": None}
    assert found["facts"]["drop_in"] is None
    assert "drop-in" not in found["facts"]["errors"]
    assert [f["subject"] for f in found["findings"] if f["level"] == "fail"] == [
        "torch",
        "cuDNN frontend",
    ]
