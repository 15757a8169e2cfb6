"""What the Dockerfile does, step by step in a folder: compile, check, run.

    python examples/container/without_docker.py --gpu h200

The first two steps need no GPU. The last one computes on the GPU that is here, which finds the
plans if it is of that kind, or else on the CPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def run(*arguments: str, **variables: str) -> None:
    """Runs Python with these arguments and variables; an error ends this program too."""
    shown = [f"{name}={value}" for name, value in variables.items()] + ["python", *arguments]
    print("$", shlex.join(shown), flush=True)
    subprocess.run([sys.executable, *arguments], env={**os.environ, **variables}, check=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h200", help="for this GPU; default: %(default)s")
    parser.add_argument("--plans", type=Path, help="keep the plans here; default: nowhere")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        plans = str(args.plans or folder)
        calls, serve = str(HERE / "calls.jsonl"), str(HERE / "serve.py")
        ready = {"TORCH_CUDNN_MHA_PLANS": plans, "TORCH_CUDNN_MHA_CACHE_DIR": "off"}
        run("-m", "cudnn_mha", "compile", "--gpu", args.gpu, "--from", calls, "--out", plans)
        run(serve, "--check", args.gpu, **ready, TORCH_CUDNN_MHA_BUILD="never")
        run(serve, **ready)


if __name__ == "__main__":
    main()
