"""The program of the image: the attention calls of a small server, prompts and then tokens.

    python serve.py              # makes the calls, and says which plans they ran on
    python serve.py --check h200 # without a GPU: is there a plan for each call on an H200?

`TORCH_CUDNN_MHA_PLANS` names the folder of the plans. `calls.jsonl` holds these calls, as running
this on a GPU with TORCH_CUDNN_MHA_RECORD=calls.jsonl writes them; record anew when they change.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import cudnn_mha

HEADS, KEY_HEADS, DIM = 16, 4, 128
PROMPTS = (256, 512)
CACHE = 1024
BATCH = 8


def heads(batch: int, length: int, count: int, device: str) -> Tensor:
    """``(B, H, S, D)`` as a projection leaves it: ``(B, S, H, D)`` in memory."""
    made = torch.zeros(batch, length, count, DIM, dtype=torch.bfloat16, device=device)
    return made.transpose(1, 2)


def calls(device: str) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    """Every call: its name, query, key and value, and the other arguments."""
    causal = {"is_causal": True, "enable_gqa": True}
    for length in PROMPTS:
        query, keys = heads(1, length, HEADS, device), heads(1, length, KEY_HEADS, device)
        yield f"prompt of {length}", (query, keys, keys), causal
    query, keys = heads(BATCH, 1, HEADS, device), heads(BATCH, CACHE, KEY_HEADS, device)
    filled = torch.full((BATCH,), 600, dtype=torch.int32, device=device)
    yield "next tokens", (query, keys, keys), {"enable_gqa": True, "seq_lens_kv": filled}


def check(gpu: str) -> bool:
    """Whether cuDNN serves every call on a described GPU, by plans that are there."""
    complete = True
    for name, tensors, options in calls("meta"):
        before = cudnn_mha.cache_info().builds
        verdict = cudnn_mha.explain(*tensors, **options, gpu=gpu)
        ready = verdict.served and cudnn_mha.cache_info().builds == before
        complete = complete and ready
        print(f"{name}: {'its plan is there' if ready else 'NO PLAN'}")
        for reason in verdict.reasons:
            print(f"  {reason}")
    return complete


def serve(device: str) -> None:
    """Makes every call twice and says how long it took."""
    for name, tensors, options in calls(device):
        taken = []
        for _ in range(2):
            began = time.perf_counter()
            cudnn_mha.cudnn_sdpa(*tensors, **options)
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(f"{1e3 * (time.perf_counter() - began):.2f} ms")
        print(f"{name}: at first {taken[0]}, then {taken[1]}")
    info = cudnn_mha.cache_info()
    print(f"plans loaded: {info.loads}, compiled here: {info.builds}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", metavar="GPU", help="only look for plans for this GPU")
    args = parser.parse_args(argv)
    if args.check:
        return 0 if check(args.check) else 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("there is no GPU: PyTorch computes, and no plan is needed")
    with torch.inference_mode():
        serve(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
