"""The command line: exit codes, JSON, texts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnn_mha import __version__, arguments, config, devices, doctor, printing, runtime
from cudnn_mha.doctor import Facts, Finding, Gpu, Report, Versions
from tests.support import ESCAPE, parsed, run

GQA = ("--gpu", "h200", "--q", "2,8,777,64", "--kv", "2,2,777,64")
# ------------------------------------------------------------------------------------------- help


def test_help_needs_neither_torch_nor_cudnn() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["cudnn"] = None
sys.argv = ["cudnn-mha", "--help"]
import runpy
runpy.run_module("cudnn_mha", run_name="__main__")
"""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert (done.returncode, done.stderr) == (0, "")
    assert all(
        command in done.stdout for command in ("cache", "check", "compile", "demo", "doctor")
    )
    assert seconds < 5  # torch alone would take about as long


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_mha", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"cudnn-mha {__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["check", "compile", "demo", "doctor"]
    + [f"cache {name}" for name in ("list", "show", "clear", "verify")],
)
def test_every_command_helps(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"  cudnn-mha {command}" in result.stdout  # an example
    assert "--json" in result.stdout


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn_mha.explanation", None)
    result = run("check", *GQA)
    assert result.exit_code == 1
    assert "cudnn_mha.explanation" in result.stderr
    assert "`cudnn-mha doctor` shows what is wrong" in result.stderr


# ----------------------------------------------------------------------- output that goes nowhere


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "check --gpu h200 --q 1,1,8,8", "cache list", "doctor --json"],
)
def test_a_full_disk_is_one_line(tmp_path: Path, command: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cudnn_mha", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {config.CACHE_DIR: str(tmp_path), "PYTHONUNBUFFERED": unbuffered},
        )
    problem = "Error: the output cannot be written: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, problem)


@pytest.mark.parametrize(
    "command", ["--help", "check --gpu h200 --q 1,1,8,8", "doctor", "doctor --json"]
)
def test_a_reader_that_left_is_no_word(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_mha", *command.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_other_failures_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(doctor, "collect", fail)
    with pytest.raises(OSError, match="no memory"):
        run("doctor")


# ------------------------------------------------------------------------------------------ check


def test_served() -> None:
    found = parsed(result := run("check", *GQA, "--causal", "--backward", "--json"))
    assert result.exit_code == 0
    assert found["served"] is True
    assert found["device"] == "NVIDIA H200 (sm_90, described)"
    assert found["reasons"] == []
    assert found["runs"] == "cuDNN"
    forward, backward = found["graphs"]
    assert forward["spec"].startswith("forward query=2x8x777x64:bfloat16 key=2x2x777x64:bfloat16")
    assert backward["spec"].startswith("backward ")
    for graph in found["graphs"]:
        assert graph["engine"].startswith("eng")
        assert isinstance(graph["workspace"], int)
        assert " causal" in graph["spec"]
    assert forward["remedies"] == []
    assert len(backward["remedies"]) == 1

    text = run("check", *GQA, "--causal", "--backward")
    assert text.exit_code == 0
    assert ESCAPE not in text.stdout
    lines = text.stdout.splitlines()
    assert lines[0] == "served by cuDNN on NVIDIA H200 (sm_90, described)"
    assert lines[-1] == "runs: cuDNN"
    assert f"  engine     {backward['engine']}" in lines
    assert f"  remedy     {backward['remedies'][0]}" in lines
    assert f"({backward['workspace']:,} bytes)" in text.stdout


def test_workspace_limit() -> None:
    found = parsed(
        result := run("check", *GQA, "--causal", "--backward", "--workspace-limit", "1kB", "--json")
    )
    assert result.exit_code == 1
    assert [reason["rule"] for reason in found["reasons"]] == ["workspace_limit"]
    assert "workspace_limit = 1000 bytes" in found["reasons"][0]["message"]
    assert [graph["engine"] for graph in found["graphs"]] == [None, None]


def test_head_dim() -> None:
    found = parsed(
        result := run("check", "--gpu", "a10", "--q", "1,4,128,256", "--backward", "--json")
    )
    assert result.exit_code == 1
    assert found["served"] is False
    assert [reason["rule"] for reason in found["reasons"]] == ["head_dim"]
    assert found["reasons"][0]["kind"] == "unsupported"
    assert found["runs"].startswith("torch.nn.functional.scaled_dot_product_attention")


def test_every_reason_is_printed() -> None:
    result = run(
        *("check", "--gpu", "B200", "--q", "1,4,1,192", "--dropout", "0.1", "--deterministic"),
        *("--backward", "--lse"),
    )
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "not served by cuDNN on NVIDIA B200 (sm_100, described)"
    rules = [line.rpartition("[")[2] for line in lines if line.startswith("  reason: ")]
    assert {"single_token]", "head_dim]", "dropout]", "exclusive]"} <= set(rules)
    assert lines[-1] == "runs: cudnn_mha.reference, plain PyTorch"


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        (("--q", "1,1,99999999999,64"), ["size", "size", "memory"]),
        (("--q", "1,1,64,1000000000"), ["memory"]),
        (("--q", "1,1,64,9000000000"), ["size", "size", "memory"]),
        (("--q", "1,1,0,64"), ["empty"]),
    ],
)
def test_absurd_sizes_have_a_plain_reason(arguments: tuple[str, ...], rules: list[str]) -> None:
    result = run("check", "--gpu", "h200", *arguments)
    assert result.exit_code == 1
    reasons = [line for line in result.stdout.splitlines() if line.startswith("  reason: ")]
    assert [reason.rpartition("[")[2] for reason in reasons] == [f"{rule}]" for rule in rules]
    assert "engine" not in result.stdout
    assert "CUDNN" not in result.stdout


def asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """What ``check`` with these arguments asks of `explain`."""
    from cudnn_mha import explanation

    calls = []

    def explain(q: Any, k: Any, v: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        dropout, causal, scale, gqa = rest
        named |= {"q": q, "k": k, "v": v, "mask": mask, "dropout": dropout, "causal": causal}
        calls.append(named | {"scale": scale, "gqa": gqa})
        return explanation.Explanation(True, "GPU", (), (), "cuDNN")

    monkeypatch.setattr(explanation, "explain", explain)
    assert run("check", *arguments).exit_code == 0
    (call,) = calls
    return call


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, "--gpu", "h200", "--q", "4, 8,128,64") == {
        "q": (4, 8, 128, 64),
        "k": (4, 8, 128, 64),
        "v": (4, 8, 128, 64),
        "mask": None,
        "dropout": 0.0,
        "causal": False,
        "scale": None,
        "gqa": False,
        "return_lse": False,
        "deterministic": None,
        "workspace_limit": None,
        "seq_lens_q": False,
        "seq_lens_kv": False,
        "causal_alignment": "top_left",
        "window": None,
        "alibi": False,
        "alibi_slopes": False,
        "softcap": None,
        "sinks": False,
        "dtype": torch.bfloat16,
        "mask_dtype": torch.bool,
        "requires_grad": False,
        "gpu": "h200",
    }


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    call = asked(
        monkeypatch,
        *("--gpu", "b200", "--q", "4,8,128,64", "--kv", "4,2,256,64", "--v", "4,2,256,128"),
        *("--dtype", "fp16", "--mask", "128,256", "--mask-dtype", "fp32", "--dropout", "0.25"),
        *("--scale", "0.5", "--lse", "--deterministic", "--workspace-limit", "64MiB", "--backward"),
    )
    assert (call["q"], call["k"], call["v"]) == ((4, 8, 128, 64), (4, 2, 256, 64), (4, 2, 256, 128))
    assert (call["mask"], call["mask_dtype"]) == ((128, 256), torch.float32)
    assert (call["dtype"], call["gpu"]) == (torch.float16, "b200")
    assert (call["dropout"], call["scale"], call["gqa"]) == (0.25, 0.5, True)
    assert (call["return_lse"], call["deterministic"], call["requires_grad"]) == (True, True, True)
    assert config.parse_bytes(call["workspace_limit"]) == 64 * 2**20


def test_arguments_that_pytorch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch, *GQA, "--lengths", "--alignment", "bottom_right", "--window",
                  "-1, 12", "--softcap", "2.5", "--alibi", "--sinks")  # fmt: skip
    assert (found["seq_lens_q"], found["seq_lens_kv"]) == (True, True)
    assert (found["causal_alignment"], found["window"]) == ("bottom_right", (-1, 12))
    assert (found["softcap"], found["alibi"], found["sinks"]) == (2.5, True, True)
    assert found["alibi_slopes"] is False
    assert asked(monkeypatch, *GQA, "--slopes")["alibi_slopes"] is True


def test_how_lengths_are_told() -> None:
    found = parsed(result := run("check", *GQA, "--lengths", "--json"))
    assert result.exit_code == 0
    assert found["lengths"].startswith("ragged: ")
    (graph,) = found["graphs"]
    assert graph["spec"].startswith("forward query=2x8x1024x64:bfloat16@(397824, 49728, 64, 1) ")
    assert graph["spec"].endswith(" lengths ragged")
    assert graph["engine"].startswith("eng")
    lines = run("check", *GQA, "--lengths").stdout.splitlines()
    assert lines[-2:] == [f"lengths: {found['lengths']}", "runs: cuDNN"]


def test_alibi_beside_lengths() -> None:
    found = parsed(result := run("check", *GQA, "--lengths", "--slopes", "--json"))
    assert result.exit_code == 1
    assert [reason["rule"] for reason in found["reasons"]] == ["score_operations"]
    assert found["runs"] == "cudnn_mha.reference, plain PyTorch"


@pytest.mark.parametrize(("flag", "gqa"), [("--gqa", True), ("--no-gqa", False)])
def test_gqa_can_be_said(monkeypatch: pytest.MonkeyPatch, flag: str, gqa: bool) -> None:
    assert asked(monkeypatch, *GQA, flag)["gqa"] is gqa


@pytest.mark.parametrize("shape", ["2,8,128,64", "8,128,64"])
def test_layout(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    call = asked(monkeypatch, "--gpu", "h200", "--q", shape, "--layout", "bshd")
    for name in "qkv":
        assert call[name].shape == tuple(map(int, shape.split(",")))
        assert call[name].stride()[-3:] == (64, 512, 1)
        assert call[name].device.type == "meta"


def test_layout_for_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors take none of its memory."""
    shape = (2**14, 8, 2**14, 64)
    tensor = arguments.lengths_before_heads(shape, torch.float16)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape, torch.float16, "meta")
    assert tensor.stride() == (2**14 * 512, 64, 512, 1)

    here = devices.described("h200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "cuda", lambda index: here)
    result = run("check", "--q", "1,4,128,512", "--layout", "bshd", "--backward")
    assert result.exit_code == 1
    assert "on NVIDIA H200" in result.stdout
    assert "query=1x4x128x512:bfloat16@(262144, 512, 2048, 1)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--q", "1,4,128,64"), "--gpu must name one: a10, a100-sxm-80gb, b200, h100-sxm, h200,"),
        (("--gpu", "h300", "--q", "1,4,128,64"), "'h300' is not one of 'a10',"),
        (("--gpu", "h200"), "Missing option '--q'"),
        (("--gpu", "h200", "--q", "1,4,128,x"), "'--q': '1,4,128,x' is no list of whole numbers"),
        (("--gpu", "h200", "--q", "1,4,-1,64"), "'--q': '1,4,-1,64' is no list of whole numbers"),
        (("--gpu", "h200", "--q", ""), "'--q': '' is no list of whole numbers"),
        (("--gpu", "h200", "--q", "128,64"), "'128,64' must have 4 numbers B,H,S,D or 3 H,S,D"),
        (("--gpu", "h200", "--q", "1,4,128,99999999999999999"), "has more elements than"),
        ((*GQA, "--v", "2,2,778,64"), "key and value must have the same length, got 777 and 778"),
        ((*GQA, "--no-gqa"), "for grouped-query attention set enable_gqa=True"),
        ((*GQA, "--mask", "2,1,1,5"), "attn_mask must broadcast to (2, 8, 777, 777)"),
        (
            ("--gpu", "h200", "--q", "1,1,99999999999,8", "--mask", "99999999999,1"),
            "attn_mask would be of shape (99999999999, 99999999999)",
        ),
        ((*GQA, "--mask", "1", "--causal"), "--mask and --causal exclude each other"),
        ((*GQA, "--window", "5"), "'--window': '5' is no window such as 1023,0 or -1,128"),
        ((*GQA, "--window", "5,x"), "'5,x' is no window such as"),
        ((*GQA, "--window", "-2,0"), "window must hold -1 (no bound) or more, got (-2, 0)"),
        ((*GQA, "--softcap", "-1"), "softcap must be positive, or None or 0 for none"),
        ((*GQA, "--alignment", "left"), "'left' is not one of 'top_left', 'bottom_right'"),
        ((*GQA, "--dropout", "1.5"), "dropout_p must be in [0, 1], got 1.5"),
        ((*GQA, "--scale", "nan"), "scale must be finite"),
        ((*GQA, "--workspace-limit", "much"), "workspace_limit must be a number of bytes or"),
        ((*GQA, "--dtype", "int8"), "'int8' is not one of 'bf16'"),
    ],
)
def test_usage_errors(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("check", *arguments, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in " ".join(result.stderr.split())


def test_environment_that_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.WORKSPACE_LIMIT, "much")
    config.settings.cache_clear()
    try:
        for arguments in (("check", *GQA), ("demo", "--gpu", "h200")):
            result = run(*arguments)
            assert result.exit_code == 2
            assert f"{config.WORKSPACE_LIMIT} must be a number of bytes" in result.stderr
    finally:
        config.settings.cache_clear()


# ----------------------------------------------------------------------------------------- doctor


def test_doctor_on_this_machine() -> None:
    result = run("doctor", "--json")
    found = parsed(result)
    assert result.exit_code == int(found["failed"])
    versions = found["facts"]["versions"]
    assert versions["torch"] == torch.__version__
    assert versions["frontend_cudnn"] == runtime.cudnn_version()
    assert {finding["subject"] for finding in found["findings"]} >= {"torch", "cuDNN", "switches"}


FACTS = Facts(
    Versions("3.12.1", "Linux", torch="2.14.1", torch_cudnn=91900),
    libraries=(doctor.Library("/opt/[x]/libcudnn.so.9", loaded=True),),
    gpus=(Gpu(0, "NVIDIA H200", 90, 141 * 2**30),),
    variables={config.DISABLED: "1"},
    sdp_enabled=True,
    errors={"ldconfig": "OSError: none"},
)


@pytest.mark.parametrize(
    ("level", "code", "last"),
    [("warn", 0, "nothing is broken; warnings: 1"), ("fail", 1, "cuDNN attention cannot work")],
)
def test_doctor_text(
    monkeypatch: pytest.MonkeyPatch, level: doctor.Level, code: int, last: str
) -> None:
    remedy = "pip install " + "a-long-name " * 20
    findings = (Finding("ok", "torch", "fine"), Finding(level, "cuDNN", "old [x]", remedy.strip()))
    monkeypatch.setattr(doctor, "collect", lambda: Report(FACTS, findings))
    result = run("doctor")
    assert result.exit_code == code
    assert ESCAPE not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1].startswith(last)
    assert "note ldconfig: could not be asked (OSError: none)" in lines
    at = lines.index("ok   torch: fine")
    assert lines[at + 1] == f"{level} cuDNN: old [x]"
    assert lines[at + 2] == f"     remedy: {remedy.strip()}"  # one line, to be copied
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert ["cuDNN as torch sees it", "9.19.0"] in cells
    assert ["cuDNN frontend", "-"] in cells
    assert ["libcudnn.so.9", "yes", "/opt/[x]"] in cells
    assert ["0", "NVIDIA H200", "sm_90", "141.0 GiB"] in cells
    assert [config.DISABLED, "1"] in cells
    assert ["torch.backends.cuda.cudnn_sdp_enabled()", "on"] in cells


# --------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**16, "64.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
    ],
)
def test_bytes(count: int | None, text: str) -> None:
    assert printing.byte_text(count) == text
