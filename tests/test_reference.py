"""The reference, held against PyTorch's math kernel, FlexAttention, torch.logsumexp and loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudnn_mha import reference
from cudnn_mha.reference import attention

B, H, SQ, SKV, D = 2, 4, 5, 7, 6
MASK_SHAPES = [
    (SQ, SKV),
    (1, SKV),
    (SQ, 1),
    (SKV,),
    (),
    (H, SQ, SKV),
    (1, H, SQ, SKV),
    (B, 1, SQ, SKV),
    (B, 1, 1, SKV),
    (1, H, 1, 1),
    (B, H, SQ, 1),
    (B, H, SQ, SKV),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def inputs(
    *, b: int = B, hq: int = H, hk: int = H, hv: int = H, sq: int = SQ, skv: int = SKV
) -> tuple[Tensor, Tensor, Tensor]:
    return normal(b, hq, sq, D), normal(b, hk, skv, D), normal(b, hv, skv, D + 2)


def oracle(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return attention(*args, compute_dtype=torch.float64, **options)


def torch_math(*args: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def equal(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a loss that weighs every output differently."""
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    return torch.autograd.grad((out.double() * weights).sum(), leaves)


def same_as_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **o: Any) -> None:
    """Output and every gradient, that of the mask included, equal those of PyTorch's kernel."""
    leaves = [t for t in (q, k, v, mask) if t is not None and t.requires_grad]
    gqa = q.size(-3) != k.size(-3) or q.size(-3) != v.size(-3)
    want = torch_math(q, k, v, attn_mask=mask, enable_gqa=gqa, **o)
    got, _ = oracle(q, k, v, mask, **o)
    equal(got, want)
    equal(gradients(got, *leaves), gradients(want, *leaves))


def loops(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, keep: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """The definition, one Python number at a time; ``bias`` holds -inf where a key is hidden."""
    hq, sq, skv = bias.shape
    out, lse = torch.zeros(hq, sq, v.size(-1), dtype=torch.float64), torch.zeros(hq, sq).double()
    for h in range(hq):
        kh, vh = k[h * k.size(0) // hq].tolist(), v[h * v.size(0) // hq].tolist()
        for i in range(sq):
            qi = q[h, i].tolist()
            s = [
                scale * sum(a * b for a, b in zip(qi, kh[j], strict=True)) + float(bias[h, i, j])
                for j in range(skv)
            ]
            total = sum(math.exp(x) for x in s)
            lse[h, i] = math.log(total) if total else -math.inf
            for j in range(skv):
                if s[j] > -math.inf and (keep is None or keep[h, i, j]):
                    for d in range(v.size(-1)):
                        out[h, i, d] += math.exp(s[j]) / total / (1 - p) * vh[j][d]
    return out, lse


# --- against PyTorch's math kernel


@pytest.mark.parametrize("sq,skv", [(5, 5), (5, 7), (7, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_and_lengths_as_torch(sq: int, skv: int, is_causal: bool) -> None:
    same_as_torch(*inputs(sq=sq, skv=skv), is_causal=is_causal)


@pytest.mark.parametrize("scale", [None, 0.0, 0.3, -2.0])
def test_scale_as_torch(scale: float | None) -> None:
    same_as_torch(*inputs(), scale=scale)


@pytest.mark.parametrize("hk,hv", [(1, 1), (2, 2), (1, 2), (4, 2), (2, 1)])
def test_grouped_heads_as_torch(hk: int, hv: int) -> None:
    same_as_torch(*inputs(hk=hk, hv=hv), is_causal=True)


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
def test_every_mask_shape_as_torch(shape: tuple[int, ...], kind: str) -> None:
    visible = torch.rand(shape) < 0.6
    mask = visible
    if kind == "float":
        mask = normal(*shape)
    elif kind == "infinite":
        mask = torch.randn(shape, dtype=torch.float64).masked_fill(~visible, -math.inf)
    same_as_torch(*inputs(hk=2, hv=2), mask)


def test_float32_mask_beside_bfloat16_is_not_rounded() -> None:
    q, k, v = (t.detach().bfloat16() for t in inputs())
    mask = 8 * torch.randn(B, H, SQ, SKV)
    want = torch_math(q.double(), k.double(), v.double(), attn_mask=mask.double())
    rounded = torch_math(q.double(), k.double(), v.double(), attn_mask=mask.bfloat16().double())
    got, lse = attention(q, k, v, mask, compute_dtype=torch.float32)
    assert (got.dtype, lse.dtype) == (torch.float32, torch.float32)
    equal(got.double(), want, 2e-6)
    assert (want - rounded).abs().max() > 1e-3
    default, _ = attention(q, k, v, mask)
    assert default.dtype == torch.bfloat16
    assert torch.equal(default, got.bfloat16())


def test_leading_dimensions_broadcast() -> None:
    q, k, v = normal(3, 1, 2, SQ, D), normal(1, SKV, D), normal(2, 2, SKV, D)
    want = torch_math(
        q.expand(3, 2, 2, SQ, D), k.expand(3, 2, 2, SKV, D), v.expand(3, 2, 2, SKV, D)
    )
    out, lse = oracle(q, k, v)
    equal(out, want)
    equal(gradients(out, q, k, v), gradients(want, q, k, v))
    assert lse.shape == (3, 2, 2, SQ)
    equal(oracle(q[0, 0], k, v[0])[0], out[0, 0])


# --- against other implementations


@pytest.mark.parametrize("hk,hv", [(4, 4), (2, 2), (1, 2), (2, 4)])
def test_definition_in_loops(hk: int, hv: int) -> None:
    q, k, v = (t.detach()[0] for t in inputs(hk=hk, hv=hv, sq=3, skv=4))
    bias = normal(H, 3, 4, grad=False).masked_fill(torch.rand(H, 3, 4) < 0.3, -math.inf)
    bias[1, 2] = -math.inf
    keep = torch.rand(H, 3, 4) < 0.6
    equal(oracle(q, k, v, bias, scale=0.7), loops(q, k, v, bias, 0.7, None, 0.0))
    equal(
        oracle(q, k, v, bias, dropout_p=0.25, scale=0.7, dropout_mask=keep),
        loops(q, k, v, bias, 0.7, keep, 0.25),
    )
    past = torch.tensor([[0.0 if j <= i else -math.inf for j in range(4)] for i in range(3)])
    equal(
        oracle(q, k, v, is_causal=True),
        loops(q, k, v, past.double().expand(H, 3, 4), 1 / math.sqrt(D), None, 0.0),
    )


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_output_and_lse() -> None:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q, k, v = (t.detach() for t in inputs(hk=2, hv=2))  # it has no backward on the CPU
    bias = normal(H, SQ, SKV, grad=False)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, SQ, SKV, device="cpu")
    want, aux = flex_attention(
        q,
        k,
        v,
        score_mod=lambda score, b, h, i, j: score + bias[h, i, j],
        block_mask=causal,
        scale=0.4,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    past = torch.arange(SQ)[:, None] >= torch.arange(SKV)
    assert isinstance(aux.lse, Tensor)
    mask = bias.masked_fill(~past, -math.inf)
    out, lse = oracle(q, k, v, mask, scale=0.4)
    equal(out, want)
    equal(lse, aux.lse.double(), 1e-6)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_lse_and_its_gradient(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = inputs(hk=2)
    mask = normal(H, SQ, SKV)
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * 0.9 + mask
    want = torch.logsumexp(scores, -1)
    _, lse = attention(q, k, v, mask, scale=0.9, compute_dtype=dtype)
    assert lse.dtype == dtype
    equal(lse.double(), want, tolerance)
    equal(gradients(lse, q, k, mask), gradients(want, q, k, mask), 10 * tolerance)


def test_gradcheck_of_both_results() -> None:
    q, k, v = normal(1, 2, 3, 2), normal(1, 1, 4, 2), normal(1, 2, 4, 2)
    bias = normal(2, 1, 4)
    keep = torch.rand(2, 3, 4) < 0.5
    options: dict[str, Any] = {"dropout_p": 0.5, "dropout_mask": keep}
    assert torch.autograd.gradcheck(lambda *t: oracle(*t, **options), (q, k, v, bias))
    assert torch.autograd.gradcheck(lambda *t: oracle(*t, is_causal=True), (q, k, v))


# --- rows without a key, and empty tensors


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fully_masked_rows_are_zero_in_everything(kind: str, dtype: torch.dtype) -> None:
    q, k, v = inputs()
    visible = torch.rand(B, H, SQ, SKV) < 0.7
    visible[:, :, 3] = True
    visible[:, 1:, 2] = False
    visible[1] = False
    bias = torch.zeros(B, H, SQ, SKV, dtype=dtype).masked_fill(~visible, -math.inf)
    mask = bias.requires_grad_() if kind == "float" else visible
    out, lse = attention(q, k, v, mask, compute_dtype=dtype)
    hidden = ~visible.any(-1)
    assert torch.all(out[hidden] == 0)
    assert torch.all(lse[hidden] == -math.inf)
    assert lse[~hidden].isfinite().all() and out[~hidden].ne(0).all()

    leaves = (q, k, v, mask) if kind == "float" else (q, k, v)
    for loss in (out, lse.masked_fill(hidden, 0.0), lse):
        # Also a gradient that arrives at the LSE of a hidden row must not turn into NaN.
        grads = torch.autograd.grad(
            loss, leaves, torch.ones_like(loss), retain_graph=True, allow_unused=True
        )
        for leaf, grad in zip(leaves, grads, strict=True):
            assert grad is not None or leaf is v
            assert grad is None or grad.isfinite().all()
        assert torch.all(grads[0][hidden] == 0) and torch.any(grads[0][~hidden] != 0)
        assert torch.all(grads[1][1] == 0) and torch.any(grads[1][0] != 0)
        if kind == "float":
            assert torch.all(grads[3][hidden] == 0) and torch.all(grads[3][~visible] == 0)
    assert torch.all(gradients(out, v)[0][1] == 0)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}])
def test_no_keys(options: dict[str, Any]) -> None:
    q, k, v = inputs(skv=0)
    out, lse = oracle(q, k, v, **options)
    assert torch.equal(out, torch.zeros(B, H, SQ, D + 2).double())
    assert torch.equal(lse, torch.full((B, H, SQ), -math.inf).double())
    grads = gradients(out, q, k, v)
    assert torch.equal(grads[0], torch.zeros_like(q))
    assert (grads[1].shape, grads[2].shape) == (k.shape, v.shape)


@pytest.mark.parametrize(
    "q_shape,k_shape,v_shape",
    [
        ((2, 4, 0, 6), (2, 4, 7, 6), (2, 4, 7, 8)),
        ((0, 4, 5, 6), (0, 2, 7, 6), (0, 4, 7, 8)),
        ((2, 0, 5, 6), (2, 0, 7, 6), (2, 0, 7, 8)),
        ((2, 4, 0, 6), (2, 4, 0, 6), (2, 4, 0, 8)),
        ((2, 4, 5, 6), (2, 4, 7, 6), (2, 4, 7, 0)),
    ],
)
def test_empty_results(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> None:
    q, k, v = normal(*q_shape), normal(*k_shape), normal(*v_shape)
    mask = torch.ones(q_shape[-2], k_shape[-2], dtype=torch.bool)
    for out, lse in (oracle(q, k, v), oracle(q, k, v, mask), oracle(q, k, v, is_causal=True)):
        assert out.shape == (*q_shape[:-1], v_shape[-1])
        assert lse.shape == q_shape[:-1]
        for grad in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), allow_unused=True):
            assert grad is None or grad.isfinite().all()


def test_no_head_dimension_weighs_keys_alike() -> None:
    v = normal(2, 4, 7, 3)
    out, lse = oracle(normal(2, 4, 5, 0), normal(2, 4, 7, 0), v)
    equal(out, v.mean(-2, keepdim=True).expand(2, 4, 5, 3))
    equal(lse, torch.full((2, 4, 5), math.log(7), dtype=torch.float64))


# --- extreme scores


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores(size: float) -> None:
    """Softmax of (size, size - 1) is known exactly, however large the scores are."""
    q = torch.ones(1, 1, 1, 1, requires_grad=True)
    k = torch.tensor([size, size - 1]).view(1, 1, 2, 1)
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    out, lse = attention(q, k, v)
    first = 1 / (1 + math.exp(-1))
    equal(out.item(), first, 1e-6)
    equal(lse.item(), size - math.log(first), 1e-7)
    equal(torch.autograd.grad(out, q)[0].item(), first * (1 - first), 2e-3)


def test_scores_far_apart() -> None:
    q, v = torch.ones(1, 1, 1, 1), torch.eye(3).view(1, 1, 3, 3)
    k = torch.tensor([-1e4, 1e4, 0.0]).view(1, 1, 3, 1).requires_grad_()
    out, lse = attention(q, k, v)
    assert out.flatten().tolist() == [0.0, 1.0, 0.0]
    assert lse.item() == 1e4
    assert torch.equal(torch.autograd.grad(out.sum() + lse, k)[0].flatten(), torch.eye(3)[1])


def test_lse_below_the_range_of_exp() -> None:
    """exp(-120) is 0 in float32: a sum of unshifted exponentials would lose the row."""
    q, k, v = (t.detach().float() for t in inputs())
    mask = torch.full((SQ, SKV), -120.0)
    out, lse = attention(q, k, v, mask)
    free_out, free_lse = attention(q, k, v)
    equal(lse, free_lse - 120, 1e-6)
    equal(out, free_out, 3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_of_the_lowest_number_weighs_keys_alike(dtype: torch.dtype) -> None:
    q, k, v = (t.detach().to(dtype) for t in inputs())
    mask = torch.zeros(SQ, SKV, dtype=dtype)
    mask[1] = torch.finfo(dtype).min
    mask[2, 3:] = torch.finfo(dtype).min
    out, lse = attention(q, k, v, mask, compute_dtype=dtype)
    equal(out, torch_math(q, k, v, attn_mask=mask), 1e-6)
    equal(out[:, :, 1], v.mean(-2), 1e-6)
    equal(out[:, :, 2], attention(q, k[..., :3, :], v[..., :3, :])[0][:, :, 2], 1e-6)
    assert torch.all(lse[:, :, 1] == torch.finfo(dtype).min)


# --- dtypes, layout


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_default_precision(dtype: torch.dtype) -> None:
    q, k, v = (t.detach().to(dtype) for t in inputs())
    out, lse = attention(q, k, v)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (dtype, computed)
    named, named_lse = attention(q, k, v, compute_dtype=computed)
    assert torch.equal(out, named.to(dtype)) and torch.equal(lse, named_lse)
    want, want_lse = oracle(q, k, v)
    assert (want.dtype, want_lse.dtype) == (torch.float64, torch.float64)
    equal(want, torch_math(q.double(), k.double(), v.double()))
    equal(named.double(), want, 2e-6)
    equal(lse.double(), want_lse, 2e-6)


def test_half_precision_gradients_come_from_float32() -> None:
    """Rounded once, at the very end."""
    q, k, v = (t.detach().bfloat16().requires_grad_() for t in inputs())
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    got = gradients(attention(q, k, v, compute_dtype=torch.float32)[0], q, k, v)
    for grad, want in zip(got, gradients(torch_math(*wide), *wide), strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), want, rtol=2**-8, atol=1e-5)


def test_autocast_does_not_lower_the_precision() -> None:
    q, k, v = (t.detach().float() for t in inputs())
    want, want_lse = attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, lse = attention(q, k, v)
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


def test_meta_tensors_give_shapes() -> None:
    q, k, v = (t.detach().to("meta") for t in inputs(hk=2, hv=1))
    out, lse = attention(q, k, v, is_causal=True, dropout_p=0.1)
    assert (out.shape, lse.shape) == ((B, H, SQ, D + 2), (B, H, SQ))


@pytest.mark.parametrize("order", ["BHSD", "BSHD", "SBHD", "HBSD", "SHBD"])
def test_output_has_the_dimension_order_of_the_query(order: str) -> None:
    sizes = dict(zip("BHSD", (B, H, SQ, D), strict=True))
    dense = normal(*(sizes[c] for c in order)).permute([order.index(c) for c in "BHSD"])
    k, v = normal(B, H, SKV, D), normal(B, H, SKV, D + 2)
    out, _ = oracle(dense, k, v)
    assert out.permute(["BHSD".index(c) for c in order]).is_contiguous()
    equal(out, torch_math(dense, k, v))

    # One third of a fused projection: the same order, but with gaps that the output has not.
    fused = normal(*(sizes[c] * (3 if c == "D" else 1) for c in order))
    part = fused.permute([order.index(c) for c in "BHSD"])[..., D : 2 * D]
    out, _ = oracle(part, k, v)
    assert out.permute(["BHSD".index(c) for c in order]).is_contiguous()
    equal(out, torch_math(part, k, v))


def test_layout_of_broadcast_and_single_dimensions() -> None:
    k, v = normal(B, H, SKV, 1), normal(B, H, SKV, 4)
    shared = normal(1, SQ, H, 1).transpose(1, 2)
    for query in (shared, shared.expand(B, H, SQ, 1)):
        out, _ = oracle(query, k, v)
        assert out.transpose(1, 2).is_contiguous()
        equal(out, torch_math(shared.expand(B, H, SQ, 1), k, v))


# --- dropout


def test_dropout_statistics() -> None:
    q, k, p = normal(1, 2, 64, 4), normal(1, 2, 128, 4), 0.3
    value = torch.eye(128, dtype=torch.float64).expand(1, 2, 128, 128)
    plain, lse = oracle(q, k, value)
    dropped, dropped_lse = oracle(q, k, value, dropout_p=p)
    assert torch.equal(lse, dropped_lse)
    kept = dropped != 0
    equal(dropped[kept], plain[kept] / (1 - p))
    # 16384 draws: 5 standard deviations of their mean are 0.018; of the 64 of a column, 0.29.
    assert abs(kept.double().mean().item() - (1 - p)) < 0.018
    assert (kept.double().mean(-2) - (1 - p)).abs().max() < 0.29
    assert not torch.equal(kept[0, 0], kept[0, 1])
    again, _ = oracle(q, k, value, dropout_p=p)
    assert not torch.equal(dropped, again)
    torch.manual_seed(1)
    first, _ = oracle(q, k, value, dropout_p=p)
    torch.manual_seed(1)
    assert torch.equal(oracle(q, k, value, dropout_p=p)[0], first)


@pytest.mark.parametrize("shape", [(B, H, SQ, SKV), (H, SQ, SKV), (SQ, 1), (SKV,)])
def test_given_dropout_mask(shape: tuple[int, ...]) -> None:
    q, k, v = inputs()
    keep, p = torch.rand(shape) < 0.6, 0.4
    weights = torch.softmax(q @ k.mT / math.sqrt(D), -1) * keep / (1 - p)
    state = torch.get_rng_state()
    out, lse = oracle(q, k, v, dropout_p=p, dropout_mask=keep)
    assert torch.equal(torch.get_rng_state(), state)
    equal(out, weights @ v)
    equal(gradients(out, q, k, v), gradients(weights @ v, q, k, v))
    equal(lse, torch.logsumexp(q @ k.mT / math.sqrt(D), -1))


def test_given_dropout_mask_is_used_at_probability_zero() -> None:
    q, k, v = inputs()
    none_kept = torch.zeros(SQ, SKV, dtype=torch.bool)
    assert torch.all(oracle(q, k, v, dropout_mask=none_kept)[0] == 0)


@pytest.mark.parametrize("given", [None, torch.ones(SQ, SKV, dtype=torch.bool)])
def test_dropping_everything(given: Tensor | None) -> None:
    q, k, v = inputs()
    out, lse = oracle(q, k, v, dropout_p=1.0, dropout_mask=given)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, oracle(q, k, v)[1])
    for grad in gradients(out, q, k, v):
        assert torch.all(grad == 0)


# --- arguments that do not fit


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"attn_mask": torch.ones(SQ, SKV, dtype=torch.int32)}, "attn_mask"),
        ({"attn_mask": torch.zeros(3, B, H, SQ, SKV)}, "attn_mask"),
        ({"attn_mask": torch.zeros(SQ, SKV - 1)}, "attn_mask"),
        ({"attn_mask": torch.ones(1, B, H, SQ, SKV, dtype=torch.bool)}, "attn_mask"),
        ({"dropout_p": 0.5, "dropout_mask": torch.ones(SQ, SKV)}, "dropout_mask"),
        ({"dropout_mask": torch.ones(SKV, SQ, dtype=torch.bool)}, "dropout_mask"),
        ({"dropout_p": -0.1}, "dropout_p"),
        ({"dropout_p": 1.1}, "dropout_p"),
        ({"dropout_p": math.nan}, "dropout_p"),
        ({"query": torch.zeros(SQ, D)}, "query"),
        ({"query": torch.zeros(B, H, SQ, D, dtype=torch.int64)}, "query"),
        ({"key": torch.zeros(B, 3, SKV, D)}, "key"),
        ({"key": torch.zeros(B, 0, SKV, D)}, "key"),
        ({"key": torch.zeros(B, 2 * H, SKV, D)}, "key"),
        ({"value": torch.zeros(B, 3, SKV, D)}, "value"),
        ({"key": torch.zeros(B, H, SKV, D + 1)}, "key"),
        ({"key": torch.zeros(B, H, SKV + 1, D)}, "key"),
        ({"key": torch.zeros(B, H, 1, D)}, "key"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], name: str) -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=rf"^`{name}` must be .*, got .*; "):
        attention(**{"query": q, "key": k, "value": v, **changes})


# --- gradients without autograd


def same_as_autograd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """`reference.gradients` equals autograd through `attention`; returns what it gave."""
    scores_bias = normal(*q.shape[:-1], k.size(-2)).detach().mul_(0).requires_grad_()
    bias = scores_bias
    if mask is not None and mask.dtype != torch.bool:
        bias = scores_bias + mask
    elif mask is not None:
        bias = torch.where(mask, scores_bias, -math.inf)
    upstream = normal(*q.shape[:-1], v.size(-1), grad=False)
    out, lse = oracle(q, k, v, mask, **options)
    got = reference.gradients(
        upstream, q, k, v, out.detach(), lse.detach(), mask, compute_dtype=torch.float64, **options
    )
    # A bias of zeros shows the gradients of the scores; it says what the mask says.
    shown, _ = oracle(q, k, v, bias, **options)
    equal(shown, out)
    sinks = [options["sinks"]] if options.get("sinks") is not None else []
    want = torch.autograd.grad(shown, (q, k, v, scores_bias, *sinks), upstream)
    equal(torch.autograd.grad(out, (q, k, v), upstream), want[:3])
    equal(tuple(t.detach() for t in got), want)
    return got


MASKS_OF_GRADIENTS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(B, 1, SQ, SKV) < 0.6,
    "bool_row": lambda: torch.rand(SKV) < 0.6,
    "float": lambda: normal(H, SQ, SKV, grad=False),
    "float_with_inf": lambda: normal(B, H, SQ, SKV, grad=False).masked_fill(
        torch.rand(B, H, SQ, SKV) < 0.4, -math.inf
    ),
    "no_key": lambda: torch.zeros(B, 1, SQ, SKV, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS_OF_GRADIENTS)
@pytest.mark.parametrize("hk,hv", [(H, H), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("scale", [None, 0.0, -0.7])
def test_gradients_equal_autograd(kind: str, hk: int, hv: int, scale: float | None) -> None:
    same_as_autograd(*inputs(hk=hk, hv=hv), MASKS_OF_GRADIENTS[kind](), scale=scale)


@pytest.mark.parametrize("sq,skv", [(5, 5), (5, 7), (7, 5), (1, 7), (7, 1)])
def test_gradients_of_causal_attention_equal_autograd(sq: int, skv: int) -> None:
    same_as_autograd(*inputs(hk=2, sq=sq, skv=skv), is_causal=True)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(B, H, SQ, SKV), (SQ, SKV), (H, 1, SKV)])
def test_gradients_with_dropout_equal_autograd(shape: tuple[int, ...], p: float) -> None:
    keep = torch.rand(shape) >= 0.4
    q, k, v = inputs(hk=2, hv=1)
    same_as_autograd(q, k, v, dropout_p=p, dropout_mask=keep)
    same_as_autograd(q, k, v, dropout_p=p, dropout_mask=keep, is_causal=True)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_gradients_of_rows_without_a_key_are_zero(kind: str) -> None:
    visible = torch.rand(B, H, SQ, SKV) < 0.7
    visible[:, :, 3] = True
    visible[0, 1, 2] = False
    visible[1] = False
    mask = visible
    if kind == "float":
        mask = torch.zeros(visible.shape).double().masked_fill(~visible, -math.inf)
    query, key, value, scores = same_as_autograd(*inputs(), mask)
    assert torch.all(query[0, 1, 2] == 0) and torch.any(query[0, 1, 3] != 0)
    assert torch.all(scores[~visible] == 0)
    for grad in (query, key, value, scores):
        assert torch.all(grad[1] == 0) and torch.any(grad[0] != 0)


def test_gradients_come_in_the_compute_dtype() -> None:
    q, k, v = (t.detach().bfloat16() for t in inputs(hk=2, hv=1))
    up = normal(B, H, SQ, D + 2, grad=False).bfloat16()
    out, lse = attention(q, k, v)
    for dtype, given in ((torch.float32, None), (torch.float64, torch.float64)):
        got = reference.gradients(up, q, k, v, out, lse, compute_dtype=given)
        assert [t.dtype for t in got] == [dtype] * 4
        assert [t.shape for t in got] == [q.shape, k.shape, v.shape, (B, H, SQ, SKV)]


@pytest.mark.parametrize("sq,skv", [(0, 7), (5, 0)])
def test_gradients_of_empty_tensors(sq: int, skv: int) -> None:
    for grad in same_as_autograd(*inputs(hk=2, sq=sq, skv=skv)):
        assert torch.all(grad == 0)
