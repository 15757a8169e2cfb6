"""Zeros where no kernel writes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import padding
from cudnn_mha.padding import zero_gaps, zero_padding


def lens(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_without_the_kernels_everything_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of a larger buffer leave the rest of it alone."""
    monkeypatch.setattr(padding, "LARGE", 1)
    monkeypatch.setattr(padding, "_kernels", lambda: None)
    buffer = torch.full((2, 5, 3, 8), torch.nan)
    tensor = buffer[:, :4].transpose(1, 2)
    assert zero_padding(tensor, lens(4, 1), lens(4, 4)) is tensor
    assert (tensor == 0).all()
    assert buffer[:, 4].isnan().all()
    packed = torch.full((9, 2, 8), torch.nan)
    assert (zero_gaps(packed, torch.tensor([0, 64]), lens(4), lens(4)) == 0).all()


def test_the_kernels_are_left_out_where_they_would_cost_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernels() -> None:
        raise AssertionError("nobody asks for them")

    monkeypatch.setattr(padding, "_kernels", kernels)
    assert (zero_padding(torch.ones(1, 1, 2, 4), lens(0), lens(0)) == 0).all()
    assert (zero_gaps(torch.ones(2, 1, 4), torch.tensor([0, 8]), lens(0), lens(0)) == 0).all()


def test_where_triton_does_not_work_everything_is_zero(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    kernels = SimpleNamespace(zero_padding={(1, 1, 1): broken}, zero_gaps={(1,): broken})
    monkeypatch.setattr(padding, "_kernels", lambda: kernels)
    monkeypatch.setattr(padding, "_failed", [])
    monkeypatch.setattr(padding, "LARGE", 1)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)

    class OnCuda(Tensor):
        is_cuda = True

    for _ in range(2):
        tensor = torch.ones(1, 1, 2, 4).as_subclass(OnCuda)
        assert (zero_padding(tensor, lens(2), lens(2)) == 0).all()
    packed = torch.ones(2, 1, 4).as_subclass(OnCuda)
    assert (zero_gaps(packed, torch.tensor([0, 8]), lens(2), lens(2)) == 0).all()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "C compiler" in caplog.text


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton", reason="PyTorch comes without Triton here")
    monkeypatch.setattr(padding, "LARGE", 1)


@pytest.mark.gpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dim", [8, 40, 128, 256])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_rows_behind_the_end(order: tuple[int, ...], dim: int) -> None:
    shape = [(4, 3, 77, dim)[d] for d in order]
    tensor = torch.ones(shape, device="cuda", dtype=torch.bfloat16).permute(order)
    lengths = (77, 1, 33, 0), (9, 9, 0, 9)
    zero_padding(tensor, *(lens(*n, device="cuda") for n in lengths))
    written = [n if keys else 0 for n, keys in zip(*lengths, strict=True)]
    for own, count in zip(tensor, written, strict=True):
        assert (own[:, :count] == 1).all() and (own[:, count:] == 0).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize(
    ("starts", "own", "other"),
    [
        ((0, 5, 5, 60, 100), (5, 0, 40, 40), (1, 1, 1, 1)),
        ((3, 50, 90), (47, 30), (1, 0)),
        ((0, 130, 130, 130), (129, 0, 0), (7, 0, 0)),
        ((0, 0, 0, 40), (0, 0, 40), (3, 3, 3)),
        ((20, 20), (0,), (0,)),
    ],
)
def test_rows_of_no_sequence(
    starts: tuple[int, ...], own: tuple[int, ...], other: tuple[int, ...], heads: int
) -> None:
    tensor = torch.ones(130, heads, 40, device="cuda", dtype=torch.float16)
    offsets = torch.tensor(starts, device="cuda") * heads * 40
    zero_gaps(tensor, offsets, lens(*own, device="cuda"), lens(*other, device="cuda"))
    real = torch.zeros(130, dtype=torch.bool, device="cuda")
    for start, count, keys in zip(starts, own, other, strict=False):
        if keys:
            real[start : start + count] = True
    assert (tensor[real] == 1).all() and (tensor[~real] == 0).all()
