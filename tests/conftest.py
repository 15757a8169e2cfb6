"""What all tests share: GPU tests are left out, and counted, where there are too few GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before the package reads it: no test may find what another run left on this machine's disk.
os.environ["TORCH_CUDNN_MHA_CACHE_DIR"] = "off"

import pytest
import torch

from tests.ranks import Ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _wanted(item) > GPUS]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _wanted(item: pytest.Item) -> int:
    if item.get_closest_marker("multi_gpu"):
        return 2
    return 1 if item.get_closest_marker("gpu") else 0


def pytest_report_header(config: pytest.Config) -> str:
    if not GPUS:
        return "gpu tests: deselected, this machine has no NVIDIA GPU"
    text = f"gpu tests: run on {torch.cuda.get_device_name()}"
    return text if GPUS > 1 else f"{text}; those for two GPUs are deselected"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes that compute on the CPU and talk through gloo."""
    yield from _started(Ranks("gloo", ("cpu", "cpu")))


@pytest.fixture(scope="session")
def ranks_on_one_gpu() -> Iterator[Ranks]:
    """Two processes on one GPU; NCCL takes no GPU twice, gloo does."""
    yield from _started(Ranks("gloo", ("cuda:0", "cuda:0")))


@pytest.fixture(scope="session")
def ranks_on_two_gpus() -> Iterator[Ranks]:
    """Two processes with a GPU each, which talk through NCCL."""
    yield from _started(Ranks("nccl", ("cuda:0", "cuda:1")))


def _started(ranks: Ranks) -> Iterator[Ranks]:
    with ranks:
        yield ranks
