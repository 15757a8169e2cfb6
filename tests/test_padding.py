"""Zeros where no kernel writes, on the CPU."""

from __future__ import annotations

import pytest
import torch

from cudnn_mha import padding
from cudnn_mha.padding import zero_padding


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_without_the_kernel_everything_is_zero(
    monkeypatch: pytest.MonkeyPatch, large: bool, known: bool
) -> None:
    """Views of a larger buffer leave the rest of it alone."""
    monkeypatch.setattr(padding, "LARGE", 1 if large else 2**24)
    monkeypatch.setattr(padding, "_kernel", lambda: None)
    buffer = torch.full((2, 5, 3, 8), torch.nan)
    tensor = buffer[:, :4].transpose(1, 2)
    real = torch.ones(2, 4, dtype=torch.bool) if known else None
    found = zero_padding(tensor, real)
    assert found is tensor
    assert (tensor == 0).all()
    assert buffer[:, 4].isnan().all()


def test_the_kernel_is_left_out_where_it_would_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel() -> None:
        raise AssertionError("nobody asks for it")

    monkeypatch.setattr(padding, "_kernel", kernel)
    real = torch.zeros(1, 2, dtype=torch.bool)
    assert (zero_padding(torch.ones(1, 1, 2, 4), real) == 0).all()
    monkeypatch.setattr(padding, "LARGE", 1)
    assert (zero_padding(torch.ones(1, 1, 2, 4), None) == 0).all()
