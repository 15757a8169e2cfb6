"""The operators without a GPU: schemas, layouts, values, gradients, and PyTorch's machinery."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from cudnn_mha import CudnnSdpaUnsupportedError, reference
from cudnn_mha.ops import sdpa_backward, sdpa_forward, sdpa_inference

ATEN = torch.ops.aten
B, H, SQ, SKV, D = 2, 4, 5, 7, 8


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Call(NamedTuple):
    """One call: tensors, and the arguments that are no tensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    bias_gradient: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self[:6]

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "bias_gradient": self.bias_gradient}

    def leaves(self) -> Call:
        """The same in tensors that collect gradients, with the strides they have."""
        mask = self.mask
        if mask is not None and self.bias_gradient:
            mask = mask.detach().requires_grad_()
        q, k, v = (t.detach().requires_grad_() for t in self[:3])
        return self._replace(query=q, key=k, value=v, mask=mask)

    def tensors(self) -> list[Tensor]:
        return [t for t in self[:4] if t is not None and t.requires_grad]

    def backward(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the backward that belongs to it."""
        output, *stash = sdpa_forward(*self.arguments, **self.options)
        call = (torch.randn_like(output), *self[:3], output, *stash, *self[3:6])
        return call, self.options


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads: tuple[int, int, int] = (H, H, H), dims: tuple[int, int] = (D, D)) -> list[Tensor]:
    (hq, hk, hv), (dqk, dv) = heads, dims
    return [randn(B, hq, SQ, dqk), randn(B, hk, SKV, dqk), randn(B, hv, SKV, dv)]


def bshd(dim_v: int = D) -> list[Tensor]:
    tensors = (randn(B, SQ, H, D), randn(B, SKV, H, D), randn(B, SKV, H, dim_v))
    return [t.transpose(1, 2) for t in tensors]


def keep(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.3
    mask[..., :1, :] = False  # a row that attends to nothing
    return mask


def bias(*shape: int) -> Tensor:
    return torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -math.inf)


CALLS: dict[str, Callable[[], Call]] = {
    "bhsd": lambda: Call(*qkv()),
    "bshd": lambda: Call(*bshd()),
    "bshd_dv": lambda: Call(*bshd(12), is_causal=True),
    "packed": lambda: Call(*randn(B, SQ, 3, H, D).permute(2, 0, 3, 1, 4)),
    "gaps": lambda: Call(*(t[..., :D] for t in qkv(dims=(D + 3, D + 3)))),
    "expanded_batch": lambda: Call(*(t[:1].expand(B, -1, -1, -1) for t in qkv())),
    "expanded_heads": lambda: Call(*(t[:, :1].expand(-1, H, -1, -1) for t in qkv())),
    "ones": lambda: Call(randn(1, 1, 1, D), randn(1, 1, 1, D), randn(1, 1, 1, 1)),
    "one_head": lambda: Call(*(t[:, :1] for t in bshd())),
    "gqa": lambda: Call(*qkv((4, 2, 1)), is_causal=True),
    "dv": lambda: Call(*qkv(dims=(8, 12))),
    "d20": lambda: Call(*qkv((4, 1, 2), (20, 20)), scale=0.3),
    "scale_zero": lambda: Call(*qkv(), scale=0.0),
    "scale_below_zero": lambda: Call(*qkv(), scale=-0.7),
    "bool_mask": lambda: Call(*qkv(), keep(B, H, SQ, SKV)),
    "bool_row": lambda: Call(*bshd(), torch.rand(SKV) > 0.3),
    "float_mask": lambda: Call(*qkv((4, 2, 2)), bias(B, 1, SQ, SKV)),
    "bias_gradient": lambda: Call(*bshd(), bias(B, H, SQ, SKV), bias_gradient=True),
    "bias_gradient_row": lambda: Call(*qkv(), bias(SKV), bias_gradient=True),
    "bias_gradient_2d": lambda: Call(*qkv((4, 2, 1)), bias(SQ, 1), bias_gradient=True),
    "bias_gradient_3d": lambda: Call(*qkv(), bias(H, 1, SKV), bias_gradient=True),
    "bias_gradient_4d": lambda: Call(*qkv(), bias(1, H, 1, 1), bias_gradient=True),
}
every_call = pytest.mark.parametrize("name", CALLS)


def oracle(call: Call, upstream: Tensor | None = None) -> list[Tensor]:
    """Output and log-sum-exp in float64, and with ``upstream`` the gradients of the leaves."""
    mask = call.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    output, lse = reference.attention(
        *call[:3], mask, is_causal=call.is_causal, scale=call.scale, compute_dtype=torch.float64
    )
    found = [output.detach(), lse.detach()]
    if upstream is not None:
        found += torch.autograd.grad(output, call.tensors(), upstream)
    return found


def close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    """Equal but for the log-sum-exp and the mask, which are float32."""
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------- schemas


def names(arguments: Any) -> list[str]:
    return [argument.name for argument in arguments]


FORWARD_OMITTED = {"compute_log_sumexp", "return_debug_mask"}
BACKWARD_OMITTED = {"cum_seq_q", "cum_seq_k", "max_q", "max_k"}
RETURNS_OMITTED = BACKWARD_OMITTED | {"debug_attn_mask"}


@pytest.mark.parametrize(
    "ours,pytorchs,omitted",
    [
        (sdpa_forward, ATEN._scaled_dot_product_cudnn_attention, FORWARD_OMITTED),
        (sdpa_inference, ATEN._scaled_dot_product_cudnn_attention, FORWARD_OMITTED),
        (sdpa_backward, ATEN._scaled_dot_product_cudnn_attention_backward, BACKWARD_OMITTED),
    ],
    ids=["forward", "inference", "backward"],
)
def test_arguments_are_those_of_pytorchs_operator(
    ours: Any, pytorchs: Any, omitted: set[str]
) -> None:
    given = [a for a in pytorchs.default._schema.arguments if a.name not in omitted]
    own = ours.default._schema.arguments
    assert names(own[: len(given)]) == names(given)
    for a, b in zip(own, given, strict=False):
        assert a.kwarg_only == b.kwarg_only
        assert a.default_value == b.default_value
        if a.name != "attn_bias":  # which PyTorch's backward wants also where there is none
            assert str(a.type) == str(b.type)
    assert all(a.kwarg_only and a.has_default_value() for a in own[len(given) :])


def test_results_are_those_of_pytorchs_operators() -> None:
    pytorchs = ATEN._scaled_dot_product_cudnn_attention.default._schema.returns
    given = [name for name in names(pytorchs) if name not in RETURNS_OMITTED]
    assert names(sdpa_forward.default._schema.returns) == given
    assert names(sdpa_backward.default._schema.returns) == [
        *("grad_query", "grad_key", "grad_value", "grad_attn_bias"),
    ]
    assert len(sdpa_inference.default._schema.returns) == 1


@pytest.mark.parametrize("op", [sdpa_forward, sdpa_inference, sdpa_backward], ids=str)
def test_tags(op: Any) -> None:
    assert set(op.default.tags) == {
        torch.Tag.pt2_compliant_tag,
        torch.Tag.nondeterministic_seeded,
        torch.Tag.needs_exact_strides,
    }


# ------------------------------------------------------------------------------- PyTorch's checks


def passed(results: dict[str, str]) -> None:
    assert set(results.values()) == {"SUCCESS"}, results


# opcheck's own: it looks at the gradients of its copies.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@every_call
def test_opcheck_of_forward_and_its_gradient(name: str) -> None:
    call = CALLS[name]().leaves()
    passed(opcheck(sdpa_forward.default, call.arguments, call.options))


@every_call
def test_opcheck_of_inference(name: str) -> None:
    call = CALLS[name]()
    passed(opcheck(sdpa_inference.default, call.arguments, {"scale": call.scale}))


@every_call
def test_opcheck_of_backward(name: str) -> None:
    passed(opcheck(sdpa_backward.default, *CALLS[name]().backward()))


def test_opcheck_with_dropout() -> None:
    """Two runs differ, so what compares values of one with another's is left out."""
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    call = Call(*qkv((4, 2, 1)), dropout_p=0.3)
    passed(opcheck(sdpa_forward.default, call.arguments, test_utils=utils))
    passed(opcheck(sdpa_inference.default, call.arguments, test_utils=utils))
    # What was dropped is known here: all of it can be compared.
    passed(opcheck(sdpa_backward.default, *call.backward()))


# ---------------------------------------------------------------------------------------- layouts


def layouts(tensors: Any) -> list[tuple[Any, ...]]:
    """Shape, stride and dtype; the stride of a dimension of one element says nothing."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
    return [
        (
            tuple(t.shape),
            tuple(s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True)),
            t.dtype,
        )
        for t in tensors
    ]


def on_meta(tensor: Tensor) -> Tensor:
    """The layout as it is; ``to("meta")`` would tidy it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def random_layout(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any memory order, gaps between the rows, and dimensions that are expanded or strided."""
    order = rng.sample(range(4), 4) if rng.random() < 0.7 else [0, 2, 1, 3]
    step = [rng.choice((1, 1, 1, 2)) for _ in shape]
    whole = [
        1 if rng.random() < 0.15 else shape[d] * step[d] + rng.choice((0, 0, 3)) for d in order
    ]
    tensor = torch.randn(whole).to(dtype).permute([order.index(d) for d in range(4)])
    for dim, size in enumerate(shape):
        if tensor.shape[dim] == 1:
            tensor = tensor.expand(*(size if d == dim else -1 for d in range(4)))
        tensor = tensor[(slice(None),) * dim + (slice(0, size * step[dim], step[dim]),)]
        if tensor.shape[dim] < size:
            tensor = tensor.narrow(dim, 0, 1).expand(*(size if d == dim else -1 for d in range(4)))
    return tensor


def random_call(rng: random.Random) -> Call:
    batch, unit = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    groups = [unit * rng.choice((1, 2)), unit, rng.choice((1, unit))]
    seq_q, seq_kv = rng.choice((1, 3, 8)), rng.choice((1, 4, 9))
    dim_qk = rng.choice((1, 8, 20))
    dim_v = dim_qk if rng.random() < 0.5 else rng.choice((1, 16, 5))
    dtype = rng.choice((torch.float32, torch.bfloat16))
    shapes = zip(groups, (seq_q, seq_kv, seq_kv), (dim_qk, dim_qk, dim_v), strict=True)
    tensors = [random_layout(rng, (batch, *rest), dtype) for rest in shapes]
    kind = rng.choice(("none", "causal", "bool", "float", "gradient"))
    if kind in ("none", "causal"):
        return Call(*tensors, is_causal=kind == "causal")
    scores = (batch, groups[0], seq_q, seq_kv)
    shape = [rng.choice((1, size)) for size in scores][rng.choice((0, 1, 2)) :]
    mask = torch.randn(shape).to(rng.choice((torch.float32, torch.bfloat16)))
    mask = mask.expand(scores) if rng.random() < 0.3 else mask
    mask = mask.mT.contiguous().mT if rng.random() < 0.3 else mask
    return Call(*tensors, mask > 0 if kind == "bool" else mask, bias_gradient=kind == "gradient")


@pytest.mark.parametrize("seed", range(150))
def test_results_have_the_layout_that_is_announced(seed: int) -> None:
    """For random layouts, by meta tensors and by fake ones; the gradients follow their tensors."""
    call = random_call(random.Random(seed))
    backward, options = call.backward()
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (sdpa_forward, call.arguments, call.options),
        (sdpa_inference, call.arguments, {"scale": call.scale}),
        (sdpa_backward, backward, options),
    ]
    for op, arguments, given in calls:
        real = layouts(op(*arguments, **given))
        meta = [on_meta(a) if isinstance(a, Tensor) else a for a in arguments]
        assert layouts(op(*meta, **given)) == real
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            assert layouts(op(*fake, **given)) == real
    output, lse, *drawn = layouts(sdpa_forward(*call.arguments, **call.options))
    query, value = call.query, call.value
    assert output[0] == (*query.shape[:3], value.shape[3]) and output[2] == query.dtype
    assert lse[0] == (*query.shape[:3], 1) and lse[2] == torch.float32
    assert [d[0] for d in drawn] == [(0,), (0,)]
    found = layouts(sdpa_backward(*backward, **options))
    assert found[:3] == layouts([torch.empty_like(t) for t in call[:3]])
    wanted = call.mask.shape if call.mask is not None and call.bias_gradient else (0,)
    assert found[3][0] == tuple(wanted)


def test_output_lies_in_memory_as_the_query_does() -> None:
    output, *_ = sdpa_forward(*map(on_meta, bshd(12)), None)
    assert output.stride() == (SQ * H * 12, 12, H * 12, 1)
    assert output.is_meta
    output, *_ = sdpa_forward(*map(on_meta, qkv(dims=(8, 12))), None)
    assert output.stride() == (H * SQ * 12, SQ * 12, 12, 1)


def test_fake_cuda_tensors_give_cuda_results_where_there_is_no_gpu() -> None:
    with FakeTensorMode():
        query = torch.empty(B, SQ, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        value = torch.empty(B, SQ, H, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        output, lse, seed, offset = sdpa_forward(query, query, value, None, 0.5)
        grads = sdpa_backward(
            output, query, query, value, output, lse, seed, offset, None, 0.5, False
        )
        for tensor in (output, lse, seed, offset, *grads):
            assert tensor.device.type == "cuda"
        assert layouts((output, lse, seed, offset)) == [
            ((B, H, SQ, 16), (SQ * H * 16, 16, H * 16, 1), torch.bfloat16),
            ((B, H, SQ, 1), (H * SQ, SQ, 1, 0), torch.float32),
            ((), (), torch.int64),
            ((), (), torch.int64),
        ]
        assert layouts(grads[:3]) == layouts((query, query, value))


# ----------------------------------------------------------------------------------------- values


@every_call
def test_values_and_gradients(name: str) -> None:
    call = CALLS[name]().leaves()
    output, lse, *_ = sdpa_forward(*call.arguments, **call.options)
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, call.tensors(), upstream)
    want_output, want_lse, *want = oracle(call, upstream)
    close(output, want_output)
    close(lse, want_lse.unsqueeze(-1))
    assert not lse.requires_grad
    assert len(grads) == len(want) == 3 + call.bias_gradient
    for tensor, grad, right in zip(call.tensors(), grads, want, strict=True):
        assert grad.dtype == tensor.dtype
        close(grad, right)
    plain = sdpa_inference(*call.arguments, scale=call.scale)
    close(plain, want_output)


def test_half_precision_is_rounded_once() -> None:
    call = Call(*(t.bfloat16() for t in qkv((4, 2, 1)))).leaves()
    output, lse, *_ = sdpa_forward(*call.arguments)
    upstream = torch.randn_like(output)
    wide = Call(*(t.detach().double() for t in call[:3])).leaves()
    want_output, want_lse, *want = oracle(wide, upstream.double())
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    close(output, want_output, 2**-8)
    close(lse, want_lse.unsqueeze(-1), 1e-5)
    for grad, right in zip(
        torch.autograd.grad(output, call.tensors(), upstream), want, strict=True
    ):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize(
    "shape,expanded",
    [
        ((1, SKV), (SQ, SKV)),
        ((SQ, 1), (SQ, SKV)),
        ((1, 1), (SQ, SKV)),
        ((1, SQ, SKV), (H, SQ, SKV)),
        ((H, 1, 1), (H, SQ, SKV)),
        ((1, 1, SQ, SKV), (B, H, SQ, SKV)),
        ((B, 1, 1, SKV), (B, H, SQ, SKV)),
        ((B, 1, 1, SKV), (B, 1, SQ, SKV)),
        ((1, H, SQ, 1), (B, H, SQ, SKV)),
    ],
    ids=str,
)
def test_gradient_of_an_expanded_mask(shape: tuple[int, ...], expanded: tuple[int, ...]) -> None:
    base = torch.randn(shape, requires_grad=True)
    call = Call(*qkv((4, 2, 1)), base.expand(expanded), bias_gradient=True)
    output, lse, seed, offset = sdpa_forward(*call.arguments, **call.options)
    upstream = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, base, upstream)
    exact, _ = reference.attention(*call[:3], base.double(), compute_dtype=torch.float64)
    (want,) = torch.autograd.grad(exact, base, upstream)
    close(grad, want)
    # The operator's own result has the mask's shape, and adds up to the same.
    detached = call._replace(mask=base.detach().expand(expanded))
    own = sdpa_backward(
        upstream, *call[:3], output, lse, seed, offset, detached.mask, 0.0, False, **call.options
    )[3].detach()
    assert own.shape == expanded
    close(own.sum_to_size(shape), want)


LOW = [-2e4, -1e9, torch.finfo(torch.float32).min]


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("shape", [(B, H, SQ, SKV), (SQ, SKV), (SKV,), (B, 1, 1, SKV)], ids=str)
def test_rows_of_low_mask_values_keep_their_digits(low: float, shape: tuple[int, ...]) -> None:
    """Their log-sum-exp is less the row's largest entry, and their gradients are right."""
    tail = torch.randn(shape) * abs(low) * 1e-7  # a few units in the last place of the mask
    mask = torch.full(shape, low) + tail.clamp(-10, 10)
    if len(shape) > 1 and shape[-2] > 1:
        mask[..., 0, :] = 0.5  # this row is not low
        mask[..., 1, :] = -math.inf  # and this one is empty
        mask[..., 2, 1] = -math.inf
    peak = mask.amax(-1, keepdim=True)
    peak = peak.masked_fill((peak >= -1e4) | (peak == -math.inf), 0)
    call = Call(*qkv((4, 2, 1)), mask, bias_gradient=True).leaves()
    # A constant on a row changes no output; float64 holds the difference exactly.
    shifted = Call(*(t.detach() for t in call[:3]), mask.double() - peak.double())
    shifted = shifted._replace(bias_gradient=True).leaves()
    output, lse, *_ = sdpa_forward(*call.arguments, **call.options)
    upstream = torch.randn_like(output)
    want_output, want_lse, *want = oracle(shifted, upstream)
    close(output, want_output)
    close(lse, want_lse.unsqueeze(-1))
    for grad, right in zip(
        torch.autograd.grad(output, call.tensors(), upstream), want, strict=True
    ):
        close(grad, right)


def test_empty_tensors() -> None:
    for lengths in ((0, SKV), (SQ, 0)):
        query, key, value = randn(B, H, lengths[0], D), *(randn(B, H, lengths[1], D),) * 2
        call = Call(query, key, value).leaves()
        output, lse, *_ = sdpa_forward(*call.arguments)
        assert torch.equal(output, torch.zeros(query.shape).double())
        assert torch.equal(lse, torch.full((B, H, lengths[0], 1), -math.inf))
        for tensor, grad in zip(
            call[:3], torch.autograd.grad(output, call[:3], torch.ones_like(output)), strict=True
        ):
            assert torch.equal(grad, torch.zeros_like(tensor))


# ---------------------------------------------------------------------------------------- dropout


def weights(p: float, seed: int) -> tuple[Tensor, Tensor]:
    """The weights over equal scores that the forward and the backward use."""
    torch.manual_seed(seed)
    eye = torch.eye(64).expand(2, 4, 64, 64)
    call = Call(torch.zeros(2, 4, 64, 8), torch.zeros(2, 4, 64, 8), eye, None, p).leaves()
    output, *_ = sdpa_forward(*call.arguments)
    (grad,) = torch.autograd.grad(output, call.value, eye)
    return output.detach(), grad.mT


def test_dropout_of_backward_is_that_of_forward() -> None:
    first, back = weights(0.3, 1)
    assert torch.equal(first == 0, back == 0)
    torch.testing.assert_close(first, back)
    kept = first != 0
    # 32768 draws: 5 standard deviations of their mean are 0.0127.
    assert abs(kept.double().mean().item() - 0.7) < 0.0127
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 1 / 64 / 0.7))
    assert not torch.equal(kept[0, 0], kept[0, 1])
    assert torch.equal(weights(0.3, 1)[0], first)
    assert not torch.equal(weights(0.3, 2)[0], first)


def test_dropout_gradients() -> None:
    eye = torch.eye(SKV, dtype=torch.float64).expand(B, H, SKV, SKV)
    query, key, value = qkv((4, 2, 4))
    torch.manual_seed(3)
    kept = sdpa_forward(query, key, eye, None, 0.4)[0] != 0
    assert 0 < kept.double().mean() < 1
    call = Call(query, key, value, None, 0.4).leaves()
    torch.manual_seed(3)
    output, *_ = sdpa_forward(*call.arguments)
    upstream = torch.randn_like(output)
    right, _ = reference.attention(
        *call[:3], dropout_p=0.4, dropout_mask=kept, compute_dtype=torch.float64
    )
    close(output, right)
    want = torch.autograd.grad(right, call.tensors(), upstream)
    for got, exact in zip(torch.autograd.grad(output, call[:3], upstream), want, strict=True):
        close(got, exact)


def test_seed_and_offset_are_the_stash_of_dropout_alone() -> None:
    query, key, value = qkv()
    *_, seed, offset = sdpa_forward(query, key, value, None, 0.5)
    assert seed.shape == offset.shape == () and seed.dtype == offset.dtype == torch.int64
    assert seed.data_ptr() != offset.data_ptr() and seed._base is None
    state = torch.get_rng_state()
    *_, seed, offset = sdpa_forward(query, key, value, None)
    sdpa_inference(query, key, value, None)
    assert seed.numel() == offset.numel() == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_inference_drops_as_forward_does() -> None:
    query, key, value = qkv()
    torch.manual_seed(5)
    dropped = sdpa_inference(query, key, value, None, 0.5)
    torch.manual_seed(5)
    assert torch.equal(dropped, sdpa_forward(query, key, value, None, 0.5)[0])
    assert not torch.equal(dropped, sdpa_inference(query, key, value, None, 0.5))


# ----------------------------------------------------------------------------- what cannot be done


def test_without_fallback_every_reason_is_raised() -> None:
    call = Call(*qkv())
    backward, _ = call.backward()
    wanted = {"device", "dtype"}
    for op, arguments in (
        (sdpa_forward, call.arguments),
        (sdpa_inference, call.arguments),
        (sdpa_backward, backward),
    ):
        with pytest.raises(CudnnSdpaUnsupportedError, match="cpu") as error:
            op(*arguments, fallback=False)
        assert {reason.rule for reason in error.value.reasons} >= wanted
    with pytest.raises(CudnnSdpaUnsupportedError) as error:
        sdpa_forward(*(t.bfloat16() for t in call[:3]), None, fallback=False)
    assert "dtype" not in {reason.rule for reason in error.value.reasons}


def test_backward_of_inference_says_what_to_call() -> None:
    call = Call(*qkv()).leaves()
    output = sdpa_inference(*call.arguments)
    close(output.detach(), oracle(call)[0])
    with pytest.raises(RuntimeError, match=r"leaves nothing for a backward; call sdpa_forward"):
        output.sum().backward()


def test_gradient_of_a_mask_has_to_be_asked_for() -> None:
    mask = torch.randn(SQ, SKV, requires_grad=True)
    output, *_ = sdpa_forward(*qkv(), mask)
    with pytest.raises(RuntimeError, match="bias_gradient=True"):
        output.sum().backward()


def test_gradient_of_a_mask_may_be_asked_for_without_need() -> None:
    call = Call(*qkv(), bias(SQ, SKV)).leaves()
    output, *_ = sdpa_forward(*call.arguments, bias_gradient=True)
    upstream = torch.randn_like(output)
    _, _, *want = oracle(call, upstream)
    for got, right in zip(torch.autograd.grad(output, call[:3], upstream), want, strict=True):
        close(got, right)


def test_double_backward_is_a_clear_error() -> None:
    call = Call(*qkv()).leaves()
    output, *_ = sdpa_forward(*call.arguments)
    (grad,) = torch.autograd.grad(output.sin().sum(), call.query, create_graph=True)
    _, _, want, *_ = oracle(call, output.detach().cos())
    close(grad.detach(), want)
    with pytest.raises(RuntimeError, match=r"no double backward.*enable_cudnn_sdp"):
        grad.sum().backward()


def test_unused_output_leaves_no_gradient() -> None:
    call = Call(*qkv()).leaves()
    twice = [t.detach() for t in sdpa_forward(*call.arguments)]
    output, lse, *_ = sdpa_forward(*call.arguments)
    assert output.requires_grad and not lse.requires_grad
    assert torch.equal(output, twice[0]) and torch.equal(lse, twice[1])


@pytest.mark.parametrize(
    "change,error,text",
    [
        ({"query": randn(1, H, SQ, D)}, ValueError, "same B"),
        ({"key": randn(1, H, SKV, D)}, ValueError, "same B"),
        ({"query": randn(H, SQ, D)}, ValueError, r"\(B, H, S, D\)"),
        ({"key": randn(B, H, SKV, D + 1)}, ValueError, "head dimension"),
        ({"key": randn(B, H, SKV + 1, D)}, ValueError, "same length"),
        ({"key": randn(B, 3, SKV, D)}, ValueError, "heads of key"),
        ({"value": randn(B, H, SKV, D).float()}, TypeError, "same dtype"),
        ({"mask": torch.zeros(SQ, SKV + 1)}, ValueError, "must broadcast"),
        ({"mask": torch.zeros(SQ, SKV).int()}, TypeError, "attn_mask must be"),
        ({"mask": torch.zeros(SQ, SKV), "is_causal": True}, RuntimeError, "is_causal"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p"),
        ({"scale": math.inf}, ValueError, "scale"),
    ],
)
def test_calls_that_mean_nothing_are_refused(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    call = Call(*qkv())._replace(**change)
    with pytest.raises(error, match=text):
        sdpa_forward(*call.arguments, scale=call.scale)
    with pytest.raises(error, match=text):
        sdpa_inference(*call.arguments, scale=call.scale)


# --------------------------------------------------------------------------------------- autocast


def test_autocast_casts_and_gradients_come_back() -> None:
    call = Call(*(t.float() for t in qkv((4, 2, 1))), bias(SQ, SKV)).leaves()
    half = Call(*(t.detach().bfloat16() for t in call[:3]), call.mask).leaves()
    want, want_lse, *_ = sdpa_forward(*half.arguments)
    with torch.autocast("cpu", torch.bfloat16):
        output, lse, *_ = sdpa_forward(*call.arguments)
        plain = sdpa_inference(*(t.detach() for t in call[:3]), call.mask)
    assert output.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(output, want) and torch.equal(lse, want_lse) and torch.equal(plain, want)
    upstream = torch.randn_like(output)
    got = torch.autograd.grad(output, call[:3], upstream)
    for grad, right in zip(got, torch.autograd.grad(want, half[:3], upstream), strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, right.float())


def test_autocast_leaves_float64_as_pytorch_does() -> None:
    call = Call(*qkv())
    with torch.autocast("cpu", torch.bfloat16):
        output, *_ = sdpa_forward(*call.arguments)
        plain = sdpa_inference(*call.arguments)
        assert torch.nn.functional.scaled_dot_product_attention(*call[:3]).dtype == torch.float64
    assert output.dtype == plain.dtype == torch.float64
    close(output, oracle(call)[0])


# ------------------------------------------------------------------------------------------- vmap

SIZE = 3
IN_DIMS = [
    d
    for d in itertools.product((None, 0, 2), (None, 1), (None, 4), (None, 0, 1))
    if any(dim is not None for dim in d)
]


def batched(tensors: list[Tensor], in_dims: tuple[int | None, ...]) -> list[Tensor]:
    """Random tensors with a dimension more of ``SIZE`` where there is one."""
    found = []
    for tensor, dim in zip(tensors, in_dims, strict=True):
        if dim is None:
            found.append(tensor)
        else:
            shape = list(tensor.shape)
            shape.insert(dim, SIZE)
            found.append(torch.randn(shape, dtype=tensor.dtype))
    return found


def elements(tensors: list[Tensor], in_dims: tuple[int | None, ...]) -> Iterator[list[Tensor]]:
    for i in range(SIZE):
        yield [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_equals_a_loop(in_dims: tuple[int | None, ...]) -> None:
    tensors = batched([*qkv((4, 2, 1), (8, 12)), torch.randn(SQ, SKV)], in_dims)
    leaves = [t.requires_grad_() for t in tensors[:3]]
    output, lse, *_ = torch.vmap(sdpa_forward, in_dims, (0, 0, None, None))(*tensors)
    plain = torch.vmap(sdpa_inference, in_dims)(*(t.detach() for t in tensors))
    loop = [sdpa_forward(*each)[:2] for each in elements(tensors, in_dims)]
    want, want_lse = (torch.stack(each) for each in zip(*loop, strict=True))
    close(output, want, 1e-12)
    close(lse, want_lse, 1e-6)
    close(plain, want, 1e-12)
    upstream = torch.randn_like(output)
    got = torch.autograd.grad(output, leaves, upstream)
    for grad, right in zip(got, torch.autograd.grad(want, leaves, upstream), strict=True):
        close(grad, right)


@pytest.mark.parametrize("shape", [(), (SKV,), (SQ, 1), (H, 1, SKV), (B, 1, SQ, SKV)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_vmap_over_masks_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    masks = (torch.randn(SIZE, *shape) > 0) if dtype == torch.bool else torch.randn(SIZE, *shape)
    query, key, value = qkv()

    def run(mask: Tensor) -> tuple[Tensor, Tensor]:
        output, lse, *_ = sdpa_forward(query, key, value, mask)
        return output, lse

    for got, want in zip(
        torch.vmap(run)(masks), zip(*(run(mask) for mask in masks), strict=True), strict=True
    ):
        close(got, torch.stack(want))


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 1, 0), (2, 0, 3)], ids=str)
def test_vmap_over_the_backward(in_dims: tuple[int | None, ...]) -> None:
    call = Call(*qkv((4, 2, 1)), keep(SQ, SKV))
    arguments, _ = call.backward()
    upstream, query, key, value, output, lse, seed, offset, mask, p, causal = arguments

    def run(upstream: Tensor, query: Tensor, output: Tensor) -> Any:
        return sdpa_backward(
            upstream, query, key, value, output, lse, seed, offset, mask, p, causal
        )[:3]

    tensors = batched([upstream, query, output], in_dims)
    got = torch.vmap(run, in_dims)(*tensors)
    loop = [run(*each) for each in elements(tensors, in_dims)]
    for grad, want in zip(got, zip(*loop, strict=True), strict=True):
        close(grad, torch.stack(want), 1e-12)


def test_several_upstream_gradients_at_once() -> None:
    call = Call(*qkv((4, 2, 1))).leaves()
    output, *_ = sdpa_forward(*call.arguments)
    upstream = torch.randn(SIZE, *output.shape, dtype=output.dtype)
    together = torch.autograd.grad(
        output, call[:3], upstream, is_grads_batched=True, retain_graph=True
    )
    alone = [torch.autograd.grad(output, call[:3], u, retain_graph=True) for u in upstream]
    for got, want in zip(together, zip(*alone, strict=True), strict=True):
        close(got, torch.stack(want), 1e-12)


def test_vmap_of_empty_tensors() -> None:
    query, (_, key, value) = randn(SIZE, B, H, 0, D), qkv()
    output = torch.vmap(lambda q: sdpa_inference(q, key, value, None))(query)
    assert output.shape == (SIZE, B, H, 0, D)


@pytest.mark.parametrize("op", [sdpa_forward, sdpa_inference], ids=str)
@pytest.mark.parametrize("randomness", ["error", "same"])
def test_vmap_with_dropout_says_what_randomness_it_needs(op: Any, randomness: str) -> None:
    query, key, value = batched(qkv(), (0, None, None))
    with pytest.raises(RuntimeError, match=f"randomness='different', got '{randomness}'"):
        torch.vmap(
            lambda q: op(q, key, value, attn_bias=None, dropout_p=0.5), randomness=randomness
        )(query)


def test_vmap_with_dropout_draws_for_every_element() -> None:
    query, key, _ = qkv()
    eye = torch.eye(SKV, dtype=torch.float64).expand(B, H, SKV, SKV)
    output, _, seed, offset = torch.vmap(
        lambda q: sdpa_forward(q, key, eye, None, 0.5),
        out_dims=(0, 0, None, None),
        randomness="different",
    )(query.expand(SIZE, *query.shape))
    assert seed.shape == offset.shape == ()
    dropped = output == 0
    assert dropped.any() and not dropped.all()
    for a, b in itertools.combinations(dropped, 2):
        assert not torch.equal(a, b)


def test_vmap_has_no_gradient_of_the_mask() -> None:
    query, key, value = batched(qkv(), (0, None, None))
    with pytest.raises(RuntimeError, match="no gradient of attn_bias"):
        torch.vmap(lambda q: sdpa_forward(q, key, value, torch.zeros(SKV), bias_gradient=True))(
            query
        )


# ------------------------------------------------------------------------------------------ FLOPs


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 1)], ids=str)
def test_flops_count_every_query_head(heads: tuple[int, int, int]) -> None:
    """A product is 2 B Hq Sq Skv D operations: fewer key heads save memory, not work."""
    call = Call(*qkv(heads, (8, 12))).leaves()
    product = 2 * 2 * 4 * 5 * 7  # of which 560 for each element of a head
    forward = product * (8 + 12)
    backward = product * (3 * 8 + 2 * 12)
    assert (forward, backward) == (11200, 26880)
    assert flops(lambda: sdpa_inference(*call.arguments)) == forward
    assert flops(lambda: sdpa_forward(*call.arguments)) == forward
    both = flops(lambda: sdpa_forward(*call.arguments)[0].sum().backward())
    assert both == forward + backward


def test_flops_are_those_that_pytorch_counts() -> None:
    """For its own cuDNN operators, told by their formulas."""
    from torch.utils.flop_counter import flop_registry

    call, options = Call(*qkv(dims=(8, 12))).backward()
    shapes = [t.shape for t in call[:4]]
    ours = flops(lambda: sdpa_backward(*call, **options))
    forward = flop_registry[ATEN._scaled_dot_product_cudnn_attention]
    backward = flop_registry[ATEN._scaled_dot_product_cudnn_attention_backward]
    assert forward(*call[1:4], None, True) == flops(lambda: sdpa_inference(*call[1:4], None))
    assert backward(*call[:4], *call[4:8], None, None, None, 5, 7, 0.0, False) == ours
    assert shapes[0][-1] == 12
