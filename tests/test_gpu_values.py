"""Values on the GPU: output, LSE and every gradient against float64, over the whole surface."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import cudnn_mha
from cudnn_mha import cudnn_sdpa, reference
from tests.oracle import Call, assert_right, exact, failures, ours

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
B, H, S, D = 2, 4, 200, 64


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def call(
    heads: tuple[int, int, int] = (H, H, H),
    lengths: tuple[int, int] = (S, S),
    dims: tuple[int, int] = (D, D),
    batch: int = B,
    dtype: torch.dtype = BF16,
    mask: Tensor | None = None,
    **options: object,
) -> Call:
    options.setdefault("enable_gqa", len(set(heads)) > 1)
    return Call(
        randn(batch, heads[0], lengths[0], dims[0], dtype=dtype),
        randn(batch, heads[1], lengths[1], dims[0], dtype=dtype),
        randn(batch, heads[2], lengths[1], dims[1], dtype=dtype),
        mask,
        options=dict(options),
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [(128, 128), (1, 1000), (1, 64), (1, 128), (200, 1), (2, 3), (63, 65), (64, 704), (777, 333)],
    ids=str,
)
def test_lengths(lengths: tuple[int, int], causal: bool, dtype: torch.dtype) -> None:
    assert_right(call(lengths=lengths, dtype=dtype, is_causal=causal))


@pytest.mark.parametrize(
    "dims",
    [
        *[(8, 8), (16, 64), (40, 24), (64, 128), (72, 72), (128, 64), (128, 128), (136, 136)],
        *[(192, 128), (192, 192), (200, 256), (256, 256), (20, 20), (1, 1), (100, 36), (13, 250)],
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(dims: tuple[int, int], causal: bool) -> None:
    assert_right(call(dims=dims, is_causal=causal))


@pytest.mark.parametrize("dims", [(264, 264), (512, 512), (576, 512)], ids=str)
def test_large_head_dims_forward(dims: tuple[int, int]) -> None:
    assert_right(call(dims=dims), gradients=False)
    with pytest.raises(cudnn_mha.CudnnSdpaUnsupportedError, match="head_dim"):
        ours(call(dims=dims))


@pytest.mark.parametrize(
    "heads", [(8, 2, 2), (8, 1, 1), (8, 4, 2), (8, 2, 8), (6, 3, 2), (1, 1, 1)], ids=str
)
@pytest.mark.parametrize("lengths", [(S, S), (1, 300)], ids=str)
def test_grouped_heads(heads: tuple[int, int, int], lengths: tuple[int, int]) -> None:
    assert_right(call(heads=heads, lengths=lengths))
    assert_right(call(heads=heads, lengths=lengths, is_causal=True))


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5, 1.0, -0.3])
def test_scale(scale: float) -> None:
    assert_right(call(scale=scale))
    assert_right(call(scale=scale, is_causal=True, dims=(20, 20)))


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "bshd": lambda: [randn(B, S, H, D).transpose(1, 2) for _ in range(3)],
    "hbsd": lambda: [randn(H, B, S, D).transpose(0, 1) for _ in range(3)],
    "sbhd": lambda: [randn(S, B, H, D).permute(1, 2, 0, 3) for _ in range(3)],
    "packed": lambda: list(randn(B, S, 3, H, D).permute(2, 0, 3, 1, 4)),
    "padded_rows": lambda: [randn(B, H, S, D + 8)[..., :D] for _ in range(3)],
    "expanded": lambda: [randn(1, 1, S, D).expand(B, H, S, D) for _ in range(3)],
    "expanded_kv": lambda: [randn(B, H, S, D), *(randn(B, 1, S, D).expand(B, H, S, D),) * 2],
    "reversed_last": lambda: [randn(B, H, D, S).transpose(-1, -2) for _ in range(3)],
    "odd_rows": lambda: [randn(B, H, S, D + 3)[..., :D] for _ in range(3)],
    "off_by_one": lambda: [randn(B * H * S * D + 1)[1:].view(B, H, S, D) for _ in range(3)],
    "sliced": lambda: [randn(B, H, S + 9, D)[:, :, 5 : 5 + S] for _ in range(3)],
    "strided_heads": lambda: [randn(B, 2 * H, S, D)[:, ::2] for _ in range(3)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(layout: str, causal: bool) -> None:
    assert_right(Call(*LAYOUTS[layout](), options={"is_causal": causal}))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_output_and_gradients_follow_the_memory_order(order: tuple[int, ...]) -> None:
    def make(dims: tuple[int, ...]) -> Tensor:
        back = [*(order.index(d) for d in range(3)), 3]
        return randn(*(dims[d] for d in order), dims[3]).permute(back)

    tensors = [make((B, H, S, D)).requires_grad_(), make((B, H, 72, D)).requires_grad_()]
    tensors.append(make((B, H, 72, 32)).requires_grad_())
    output = cudnn_sdpa(*tensors, fallback=False)
    expected = torch.empty(*((B, H, S)[d] for d in order), 32).permute(
        [*(order.index(d) for d in range(3)), 3]
    )
    assert output.shape == (B, H, S, 32)
    assert output.stride() == expected.stride()
    for tensor, grad in zip(
        tensors, torch.autograd.grad(output, tensors, torch.ones_like(output)), strict=True
    ):
        assert grad.stride() == tensor.stride()


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "bshd": lambda: randn(B, S, H, D).transpose(1, 2),
    "zeros_strides": lambda: randn(1, 1, 1, 1).expand(B, H, S, D),
    "expanded_heads": lambda: randn(B, 1, S, D).expand(B, H, S, D),
    "reversed_last": lambda: randn(B, H, D, S).transpose(-1, -2),
    "off_by_one": lambda: randn(B * H * S * D + 1)[1:].view(B, H, S, D),
    "odd_rows": lambda: randn(B, H, S, D + 3)[..., :D],
    "chunk": lambda: randn(B, H, 2 * S, D).chunk(2, 2)[1],
}


@pytest.mark.parametrize("layout", GRADIENTS)
def test_layouts_of_the_output_gradient(layout: str) -> None:
    case = call(is_causal=True)
    case.grad_output = GRADIENTS[layout]()
    assert_right(case)


def test_sum_backward() -> None:
    query = randn(B, H, S, D).requires_grad_()
    cudnn_sdpa(query, query, query, fallback=False).sum().backward()
    exact = query.detach().double().requires_grad_()
    reference.attention(exact, exact, exact, compute_dtype=torch.float64)[0].sum().backward()
    assert query.grad is not None and exact.grad is not None
    assert (query.grad.double() - exact.grad).norm() < 0.01 * exact.grad.norm()


def test_three_dimensions_and_broadcast_batch() -> None:
    case = call()
    flat = Call(case.query[0], case.key[0], case.value[0])
    assert_right(flat)
    query, key, value = randn(B, 1, S, D), randn(1, H, S, D), randn(B, H, S, D)
    output = cudnn_sdpa(query, key, value, fallback=False)
    want, _ = reference.attention(
        query.expand(B, H, S, D), key.expand(B, H, S, D), value, compute_dtype=torch.float64
    )
    assert output.shape == (B, H, S, D)
    assert (output.double() - want).norm() < 0.005 * want.norm()


MASK_SHAPES = [
    *[(S, 333), (B, H, S, 333), (B, 1, S, 333), (1, H, S, 333), (H, S, 333)],
    *[(B, 1, 1, 333), (1, 1, 1, 333), (333,), (B, H, 1, 1), (S, 1), (1, 1), (B, 1, S, 1)],
]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float32", "float16", "bfloat16"])
def test_masks(shape: tuple[int, ...], kind: str) -> None:
    if kind == "bool":
        mask = torch.rand(shape, device="cuda") > 0.3
    else:
        mask = randn(*shape, dtype=getattr(torch, kind))
    assert_right(call(lengths=(S, 333), mask=mask))
    assert_right(call(heads=(4, 2, 2), lengths=(S, 333), mask=mask))


@pytest.mark.parametrize("shape", [s for s in MASK_SHAPES if s[-1] > 1], ids=str)
def test_float_mask_of_half_query(shape: tuple[int, ...]) -> None:
    mask = randn(*shape, dtype=FP32)
    mask[..., ::3] = -math.inf
    assert_right(call(lengths=(S, 333), mask=mask, dtype=FP16))


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_mask_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = randn(*shape, dtype=dtype).requires_grad_()
    assert_right(call(lengths=(S, 333), mask=mask))


@pytest.mark.parametrize("lengths", [(1, 77), (300, 1), (64, 8), (257, 1000)], ids=str)
def test_mask_gradients_of_lengths(lengths: tuple[int, int]) -> None:
    mask = randn(B, H, *lengths, dtype=FP32).requires_grad_()
    assert_right(call(heads=(4, 2, 1), lengths=lengths, mask=mask))


def test_gradient_of_the_mask_alone() -> None:
    case = call()
    mask = randn(1, H, S, S, dtype=FP32).requires_grad_()
    grad_output = randn(B, H, S, D)
    output = cudnn_sdpa(case.query, case.key, case.value, mask, fallback=False)
    (grad,) = torch.autograd.grad(output, mask, grad_output)
    exact_mask = mask.detach().double().requires_grad_()
    exact, _ = reference.attention(
        case.query, case.key, case.value, exact_mask, compute_dtype=torch.float64
    )
    (want,) = torch.autograd.grad(exact, exact_mask, grad_output.double())
    assert grad.dtype == FP32 and grad.shape == mask.shape
    assert (grad.double() - want).norm() < 0.01 * want.norm()


MASK_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda m: m.transpose(-1, -2).contiguous().transpose(-1, -2),
    "odd_rows": lambda m: torch.nn.functional.pad(m, (0, 3))[..., :-3],
    "off_by_one": lambda m: torch.cat([m.flatten()[:1], m.flatten()])[1:].view(m.shape),
    "expanded": lambda m: m[:1, :1].expand(B, H, S, S),
    "expanded_rows": lambda m: m[..., :1, :].expand(B, H, S, S),
    "expanded_keys": lambda m: m[..., :1].expand(B, H, S, S),
}


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16"])
def test_mask_layouts(layout: str, kind: str) -> None:
    mask = randn(B, H, S, S, dtype=getattr(torch, kind if kind != "bool" else "float32"))
    mask = MASK_LAYOUTS[layout](mask > -0.5 if kind == "bool" else mask)
    assert_right(call(mask=mask))


@pytest.mark.parametrize("lengths", [(S, S), (128, 192), (1, 64), (1, 1000), (64, 704)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16"])
def test_rows_that_attend_to_nothing(lengths: tuple[int, int], kind: str) -> None:
    keep = torch.rand(B, 1, *lengths, device="cuda") > 0.3
    keep[0, :, 0] = False
    keep[1, :, lengths[0] // 2] = False
    mask = keep
    if kind != "bool":
        mask = torch.zeros(keep.shape, device="cuda", dtype=getattr(torch, kind))
        mask = mask.masked_fill(~keep, -math.inf)
    case = call(lengths=lengths, mask=mask)
    assert_right(case)
    got = ours(case)
    assert torch.equal(got["output"][0, :, 0], torch.zeros_like(got["output"][0, :, 0]))
    assert (got["lse"][0, :, 0] == -math.inf).all()
    assert (got["grad_query"][0, :, 0] == 0).all()


@pytest.mark.parametrize("lengths", [(1, 64), (1, 128), (1, 192), (31, 1), (200, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_short_rows_that_attend_to_nothing(lengths: tuple[int, int], batch: int, kind: str) -> None:
    mask = torch.rand(batch, H, lengths[0], 1, device="cuda") > 0.5
    mask[0, 0] = False
    if kind == "float32":
        mask = torch.zeros(mask.shape, device="cuda").masked_fill(~mask, -math.inf)
    assert_right(call(lengths=lengths, mask=mask, batch=batch))
    assert_right(call(heads=(4, 2, 1), lengths=lengths, mask=mask, batch=batch))


@pytest.mark.parametrize("low", [-1e9, -65504.0, -2e4, "lowest"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_of_very_low_mask_values(low: float | str, dtype: torch.dtype) -> None:
    fill = torch.finfo(dtype).min if low == "lowest" else float(low)
    fill = torch.tensor(fill, dtype=dtype).item()
    keep = torch.rand(B, 1, S, 192, device="cuda") > 0.3
    keep[:, :, :3] = False
    mask = torch.zeros(keep.shape, device="cuda", dtype=dtype).masked_fill(~keep, fill)
    case = call(lengths=(S, 192), mask=mask)
    # A constant on a whole row changes nothing in exact arithmetic; float64 cannot hold both.
    case.exact_mask = mask.double() - mask.double().amax(-1, keepdim=True)
    found = [f for f in failures(case) if not f.startswith("lse")]
    assert not found, found
    lse = ours(case)["lse"][:, :, :3]
    assert ((lse - fill).abs() <= 1e-5 * abs(fill) + 20).all()


@pytest.mark.parametrize("dims", [32, 64, 128, 256])
@pytest.mark.parametrize("mode", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize(
    "lengths",
    [(1, 64), (1, 128), (1, 192), (2, 128), (64, 64), (128, 192), (200, 704), (300, 1088)],
    ids=str,
)
def test_very_low_scores(lengths: tuple[int, int], mode: str, dims: int) -> None:
    mask = None
    if mode == "bool":
        mask = torch.ones(lengths, dtype=torch.bool, device="cuda")
    elif mode == "float":
        mask = torch.zeros(lengths, device="cuda")
    case = call(lengths=lengths, dims=(dims, dims), mask=mask, is_causal=mode == "causal")
    case.query[..., 0] = 1
    case.key[..., 0] = -120 * dims**0.5
    found = ours(call_with_gradient(case))
    for name, value in found.items():
        assert torch.isfinite(value).all(), name
    assert_right(case)


def call_with_gradient(case: Call) -> Call:
    shape = (*case.query.shape[:-1], case.value.shape[-1])
    case.grad_output = randn(*shape, dtype=case.query.dtype)
    return case


@pytest.mark.parametrize("factor", [10.0, 100.0])
@pytest.mark.parametrize("causal", [False, True])
def test_very_large_scores(factor: float, causal: bool) -> None:
    case = call(lengths=(S, 704), is_causal=causal)
    case.query *= factor
    assert_right(case)


@pytest.mark.parametrize("shape", [(70000, 1, 16, 32), (65536, 1, 8, 16), (1, 70000, 16, 32)])
@pytest.mark.parametrize("masked", [False, True])
def test_more_batches_or_heads_than_one_launch_takes(
    shape: tuple[int, int, int, int], masked: bool
) -> None:
    mask = torch.rand(shape[0], 1, 1, shape[2], device="cuda") > 0.3 if masked else None
    case = Call(randn(*shape), randn(*shape), randn(*shape), mask)
    assert_right(case)


def test_more_than_2_to_31_elements() -> None:
    shape = (530, 64, 512, 128)
    query, key, value, grad_output = (
        torch.empty(shape, device="cuda", dtype=BF16).normal_() for _ in range(4)
    )
    tensors = [t.requires_grad_() for t in (query, key, value)]
    output = cudnn_sdpa(*tensors, fallback=False)
    grads = torch.autograd.grad(output, tensors, grad_output)
    for i in (0, 300, 529):
        part = Call(*(t[i : i + 1].detach() for t in tensors), None, grad_output[i : i + 1])
        right = exact(part)
        names = ("output", "grad_query", "grad_key", "grad_value")
        for name, got in zip(names, (output, *grads), strict=True):
            want = right[name]
            assert (got[i : i + 1].double() - want).norm() < 0.005 * want.norm(), (name, i)


def test_mask_of_more_than_2_to_31_elements() -> None:
    length = 46592
    case = [randn(1, 1, length, D) for _ in range(3)]
    mask = torch.empty(1, 1, length, length, device="cuda", dtype=BF16).normal_()
    output = cudnn_sdpa(*case, mask, fallback=False)
    want, _ = reference.attention(
        case[0][:, :, -64:], *case[1:], mask[:, :, -64:], compute_dtype=torch.float64
    )
    assert (output[:, :, -64:].double() - want).norm() < 0.005 * want.norm()


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (2, 4, 0, 16), (2, 0, 8, 16)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    tensors = [randn(*shape).requires_grad_() for _ in range(3)]
    output = cudnn_sdpa(*tensors)
    output.sum().backward()
    assert output.shape == shape
    assert all(t.grad is not None and t.grad.shape == shape for t in tensors)


def test_no_keys() -> None:
    query = randn(B, H, 8, D).requires_grad_()
    key, value = randn(B, H, 0, D), randn(B, H, 0, D)
    output, lse = cudnn_sdpa(query, key, value, return_lse=True)
    assert torch.equal(output, torch.zeros_like(output))
    assert (lse == -math.inf).all()
    output.sum().backward()
    assert query.grad is not None and (query.grad == 0).all()


def test_one_query_and_one_key_falls_back() -> None:
    case = call_with_gradient(call(lengths=(1, 1)))
    assert_right(case, fallback=True)
    assert_right(case, gradients=False)


def test_inference_without_lse_equals_training_output() -> None:
    case = call(is_causal=True)
    with torch.no_grad():
        plain = cudnn_sdpa(case.query, case.key, case.value, is_causal=True, fallback=False)
    assert plain.grad_fn is None
    want = ours(case, gradients=False)["output"]
    assert (plain.double() - want.double()).norm() <= 0.002 * want.double().norm()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    query = torch.randn(B, H, S, D, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype):
        output = cudnn_sdpa(query, query, query, fallback=False)
    assert output.dtype == dtype
    output.sum().backward()
    assert query.grad is not None and query.grad.dtype == FP32
    want, _ = reference.attention(query, query, query, compute_dtype=torch.float64)
    assert (output.double() - want).norm() < 0.01 * want.norm()
