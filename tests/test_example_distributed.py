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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun(parallel: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    more = ["--parallel", parallel, *(["--text", str(text)] if parallel == "fsdp" else [])]
    done = subprocess.run(
        [*launch, str(EXAMPLE), *SIZES, *more],
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
    assert done.returncode == 0, done.stderr
    title, *rows = done.stdout.strip().splitlines()
    assert title == f"2 x cpu, {parallel}"
    found = [re.fullmatch(r"(\S+) +loss (\S+) -> (\S+) +([\d,]+) tokens/s", row) for row in rows]
    assert [m and m[1] for m in found] == ["cudnn_mha", "PyTorch"]
    losses = [(float(m[2]), float(m[3])) for m in found if m]
    assert all(last < first for first, last in losses)
    # The same model on the same tokens.
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
