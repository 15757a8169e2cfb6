"""What all tests share: GPU tests are left out, and counted, where there is no GPU."""

from __future__ import annotations

import os

# Before the package reads it: no test may find what another run left on this machine's disk.
os.environ["TORCH_CUDNN_MHA_CACHE_DIR"] = "off"

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)


def pytest_report_header(config: pytest.Config) -> str:
    if torch.cuda.is_available():
        return f"gpu tests: run on {torch.cuda.get_device_name()}"
    return "gpu tests: deselected, this machine has no NVIDIA GPU"
