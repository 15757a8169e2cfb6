"""The launch example, started as its docstring says, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "distributed.py"
SIZES = "--layers 1 --width 32 --heads 4 --groups 2 --length 32 --batch 2 --steps 12".split()


COMMAND = r"--nproc-per-node 2 examples/distributed.py (.+)"


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The example by two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*torchrun, str(EXAMPLE), *arguments],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(EXAMPLE.parent.parent),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@pytest.mark.parametrize("page", [EXAMPLE, EXAMPLE.parent.parent / "docs" / "distributed.md"])
def test_the_command_that_needs_no_gpu(page: Path) -> None:
    (command,) = re.findall(COMMAND, page.read_text().replace("\\\n", ""))
    done = launch(*command.split(), "--steps", "1", "--batch", "1")
    assert done.returncode == 0, done.stderr


def test_sizes_that_do_not_fit_are_refused() -> None:
    done = launch("--width", "64")
    assert "--heads must divide --width, and --groups must divide --heads" in done.stderr


def test_torchrun(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20)
    done = launch(*SIZES, "--parallel", "ddp", "fsdp", "--text", str(text))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert [lines[0], lines[3]] == ["2 x cpu, ddp", "2 x cpu, fsdp"]
    losses = []
    for line, name in zip((*lines[1:3], *lines[4:]), ("cudnn_mha", "PyTorch") * 2, strict=True):
        found = re.fullmatch(r"(\S+) +loss (\S+) -> (\S+) +([\d,]+) tokens/s", line)
        assert found is not None and found[1] == name, line
        losses.append((float(found[2]), float(found[3])))
    assert losses[0][1] < losses[0][0]
    # The same model on the same tokens, however it is shared and whoever computes.
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=2e-3)
