"""From a caller's tensors to what cuDNN can address: copies, masks, errors, parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import cudnn_sdpa
from cudnn_mha.inputs import (
    Options,
    Outline,
    addressable,
    backward_spec,
    forward_spec,
    is_half,
    layout_of,
    outline,
    prepare,
    require_tensors,
    split,
    validate,
)
from cudnn_mha.reference import attention
from cudnn_mha.spec import Direction, TensorSpec, contiguous_stride

B, H, SQ, SKV, D = 2, 4, 6, 9, 16
SCORES = (B, H, SQ, SKV)
PLAIN = Options()
GQA = Options(enable_gqa=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def qkv(
    batch: int = B, heads: tuple[int, int, int] = (H, H, H), dims: tuple[int, int] = (D, D)
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        half(batch, heads[0], SQ, dims[0]),
        half(batch, heads[1], SKV, dims[0]),
        half(batch, heads[2], SKV, dims[1]),
    )


def off_alignment(tensor: Tensor, elements: int) -> Tensor:
    """The same values that many elements into an aligned buffer."""
    buffer = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)
    view = buffer[elements:].view(tensor.shape)
    return view.copy_(tensor)


def in_order(tensor: Tensor, order: Sequence[int], gap: int = 0) -> Tensor:
    """The same values, dimensions nested in that order, the innermost with a gap behind it."""
    stored = [tensor.shape[d] for d in order]
    stored[-1] += gap
    back = [list(order).index(d) for d in range(4)]
    view = torch.zeros(stored, dtype=tensor.dtype)[..., : stored[-1] - gap].permute(back)
    return view.copy_(tensor)


# ------------------------------------------------------------------- query, key and value


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
@pytest.mark.parametrize("gap", [0, 8])
def test_what_cudnn_can_read_is_left_as_it_is(order: tuple[int, ...], gap: int) -> None:
    query, key, value = (in_order(t, order, gap) for t in qkv())
    made = prepare(query, key, value, None, PLAIN)
    assert made.query is query
    assert made.key is key
    assert made.value is value
    assert made.bias is None
    assert made.shift is None


def test_repeated_dimensions_and_odd_strides_of_single_rows_are_left_too() -> None:
    query, key, value = qkv()
    key = half(1, H, SKV, D).expand(B, H, SKV, D)
    assert prepare(query, key, value, None, PLAIN).key is key
    single = torch.empty(4096).half().as_strided((1, 1, SQ, D), (3, 5, D, 1))
    assert addressable(single)
    assert prepare(single, single, single, None, PLAIN).query is single


UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "last stride": lambda t: in_order(t, (0, 1, 3, 2)),
    "last stride of 2": lambda t: in_order(t.repeat_interleave(2, -1), (0, 1, 2, 3))[..., ::2],
    "pointer": lambda t: off_alignment(t, 1),
    "pointer by 8 bytes": lambda t: off_alignment(t, 4),
    "row stride": lambda t: in_order(t, (0, 1, 2, 3), gap=3),
    "row stride of 8 bytes": lambda t: in_order(t, (0, 1, 2, 3), gap=4),
    "head stride": lambda t: (
        torch.empty(B * 4096).half().as_strided((*t.shape,), (2048, SKV * D + 4, D, 1)).copy_(t)
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cudnn_cannot_read_is_copied_and_nothing_else(name: str) -> None:
    query, key, value = qkv()
    awkward = UNREADABLE[name](key)
    assert torch.equal(awkward, key)
    assert not addressable(awkward)
    made = prepare(query, awkward, value, None, PLAIN)
    assert made.query is query
    assert made.value is value
    assert torch.equal(made.key, key)
    assert addressable(made.key)


def test_offsets_of_16_bytes_are_aligned() -> None:
    query, key, value = qkv()
    moved = off_alignment(query, 8)
    assert prepare(moved, key, value, None, PLAIN).query is moved


def test_a_copy_keeps_the_order_in_memory() -> None:
    query, key, value = (in_order(t, (0, 2, 1, 3), gap=3) for t in qkv())
    made = prepare(query, key, value, None, PLAIN)
    assert made.query.stride() == (SQ * H * D, D, H * D, 1)
    assert torch.equal(made.query, query)


@pytest.mark.parametrize(("dim", "padded"), [(1, 8), (4, 8), (20, 24), (16, 16)])
def test_head_dimensions_are_padded_with_zeros(dim: int, padded: int) -> None:
    query, key, value = qkv(dims=(dim, 3))
    made = prepare(query, key, value, None, PLAIN)
    for got, given, size in ((made.query, query, padded), (made.value, value, 8)):
        assert got.shape == (*given.shape[:3], size)
        assert torch.equal(got[..., : given.shape[3]], given)
        assert not got[..., given.shape[3] :].any()


def test_padding_keeps_the_order_in_memory() -> None:
    query, key, value = (in_order(t, (0, 2, 1, 3)) for t in qkv(dims=(20, 20)))
    made = prepare(query, key, value, None, PLAIN)
    assert made.query.stride() == (SQ * H * 24, 24, H * 24, 1)


def test_three_dimensions_get_a_batch_of_one_without_a_copy() -> None:
    query, key, value = (t[0] for t in qkv())
    made = prepare(query, key, value, torch.zeros(H, SQ, SKV), PLAIN)
    assert [t.shape[:2] for t in made[:3]] == [(1, H)] * 3
    assert [t.data_ptr() for t in made[:3]] == [t.data_ptr() for t in (query, key, value)]
    assert made.bias is not None
    assert made.bias.shape == (1, H, SQ, SKV)


def test_batch_and_heads_are_broadcast_without_a_copy() -> None:
    query, key, value = half(1, 1, SQ, D), half(B, H, SKV, D), half(1, H, SKV, D)
    made = prepare(query, key, value, None, PLAIN)
    assert made.query.shape == (B, H, SQ, D)
    assert made.query.stride() == (0, 0, D, 1)
    assert made.query.data_ptr() == query.data_ptr()
    assert made.key is key
    assert made.value.stride() == (0, SKV * D, D, 1)


def test_key_and_value_keep_their_fewer_heads() -> None:
    made = prepare(*qkv(heads=(6, 2, 3)), None, GQA)
    assert [t.shape[1] for t in made[:3]] == [6, 2, 3]
    mqa = prepare(half(B, H, SQ, D), half(1, 1, SKV, D), half(B, 1, SKV, D), None, PLAIN)
    assert [t.shape[:2] for t in mqa[:3]] == [(B, H), (B, 1), (B, 1)]


@pytest.mark.parametrize(
    ("scale", "sign", "made"), [(0.5, 1, 0.5), (-0.5, -1, 0.5), (0.0, 0, 1.0), (None, 1, 0.25)]
)
def test_scales_reach_cudnn_above_zero(scale: float | None, sign: int, made: float) -> None:
    query, key, value = qkv()
    options = Options(scale=scale)
    got = prepare(query, key, value, None, options)
    assert torch.equal(got.query, sign * query)
    assert outline(query, value, options) == Outline(4, D, made)


def test_gradients_find_their_way_back() -> None:
    query = in_order(half(1, H, SQ, 20), (0, 2, 1, 3), gap=3).requires_grad_()
    key, value = half(B, H, SKV, 20), half(B, H, SKV, 20)
    made = prepare(query, key, value, None, Options(scale=-1.0)).query
    weights = half(*made.shape)
    (found,) = torch.autograd.grad(made, query, weights)
    assert torch.equal(found, -weights[..., :20].sum(0, keepdim=True))


# ------------------------------------------------------------------------------- the mask

MASK_SHAPES = [
    tuple(n if keep else 1 for n, keep in zip(SCORES, kept, strict=True))
    for kept in itertools.product((True, False), repeat=4)
]
MASK_SHAPES += [(), (SKV,), (1,), (SQ, SKV), (SQ, 1), (1, SKV), (H, 1, SKV), (1, SQ, 1)]
MASK_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)


def random_mask(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def by_hand(mask: Tensor) -> Tensor:
    """The additive bias of every score."""
    if mask.dtype == torch.bool:
        return torch.where(mask.expand(SCORES), 0.0, -math.inf)
    return mask.float().expand(SCORES)


def assert_canonical(bias: Tensor) -> None:
    batch, heads, *rest = bias.shape
    assert batch in (1, B)
    assert heads in (1, H)
    assert rest == [SQ, SKV]
    assert bias.data_ptr() % 16 == 0
    stored = bias.narrow(2, 0, 1) if bias.stride(2) == 0 else bias
    assert stored.is_contiguous()


@pytest.mark.parametrize("dtype", MASK_DTYPES)
@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("form", ["plain", "expanded", "transposed", "off alignment"])
def test_every_mask_becomes_the_one_form(
    shape: tuple[int, ...], dtype: torch.dtype, form: str
) -> None:
    mask = random_mask(shape, dtype)
    if form == "expanded":
        mask = mask.expand(SCORES)
    elif form == "transposed" and mask.dim() > 1:
        mask = mask.mT.contiguous().mT
    elif form == "off alignment":
        mask = off_alignment(mask, 1)
    made = prepare(*qkv(), mask, PLAIN)
    assert made.bias is not None
    assert torch.equal(made.bias.expand(SCORES).float(), by_hand(mask))
    assert made.bias.dtype == (torch.float16 if dtype == torch.bool else dtype)
    assert_canonical(made.bias)
    if made.shift is not None:
        assert not made.shift.any()


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,), (0, 1, 2)])
def test_expanded_masks_are_stored_once(dims: tuple[int, ...]) -> None:
    shape = tuple(1 if d in dims else n for d, n in enumerate(SCORES))
    made = prepare(*qkv(), random_mask(shape, torch.float32).expand(SCORES), PLAIN)
    assert made.bias is not None
    assert made.bias.untyped_storage().nbytes() == 4 * math.prod(shape)


def test_low_rows_are_shifted_up_and_the_shift_is_told() -> None:
    mask = torch.randn(SQ, SKV)
    mask[1] = -1e30
    mask[2] = torch.finfo(torch.float32).min
    mask[3] = -2e4 - torch.arange(SKV)
    mask[4, 1:] = -math.inf
    mask[4, 0] = -5e4
    mask[5] = -9999.0  # low, but not lower than the limit
    made = prepare(*qkv(), mask, PLAIN)
    assert made.bias is not None
    assert made.shift is not None
    shift = torch.tensor([0, -1e30, torch.finfo(torch.float32).min, -2e4, -5e4, 0])
    assert torch.equal(made.shift, shift.view(1, 1, SQ, 1))
    expected = mask - shift[:, None]
    assert torch.equal(made.bias[0, 0], expected)
    assert made.bias[0, 0, 1:5].amax(-1).tolist() == [0.0] * 4


def test_rows_that_hide_everything_stay_hidden() -> None:
    mask = torch.full((SQ, SKV), -math.inf)
    made = prepare(*qkv(), mask, PLAIN)
    assert made.bias is not None
    assert made.shift is not None
    assert torch.equal(made.bias[0, 0], mask)
    assert not made.shift.any()
    hidden = prepare(*qkv(), torch.zeros(SQ, SKV, dtype=torch.bool), PLAIN)
    assert hidden.bias is not None
    assert torch.equal(hidden.bias[0, 0].float(), mask)


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("low", [False, True])
def test_the_mask_gets_the_gradient_of_what_it_was_broadcast_to(
    shape: tuple[int, ...], low: bool
) -> None:
    mask = torch.randn(shape, dtype=torch.float32)
    mask = (mask - 1e6 if low else mask).requires_grad_()
    made = prepare(*qkv(), mask, PLAIN)
    assert made.bias is not None
    assert made.shift is not None
    assert bool((made.shift != 0).all()) == low
    assert not made.shift.requires_grad
    weights = torch.randn(SCORES)
    (found,) = torch.autograd.grad(made.bias.expand(SCORES), mask, weights)
    expected = weights.sum_to_size(shape)
    torch.testing.assert_close(found, expected)


# ----------------------------------------------------------------------------- validation


KINDS: list[tuple[str, object, str]] = [
    ("dropout_p", None, "a number, got None"),
    ("dropout_p", "0.0", "a number, got '0.0'"),
    ("scale", "0.5", "a number, got '0.5'"),
    ("is_causal", "no", "True or False, got 'no'"),
    ("is_causal", None, "True or False, got None"),
    ("enable_gqa", 1, "True or False, got 1"),
    ("return_lse", "yes", "True or False, got 'yes'"),
    ("fallback", 0, "True or False, got 0"),
]


@pytest.mark.parametrize(("name", "given", "text"), KINDS)
def test_arguments_of_another_kind_are_named(name: str, given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be {text}$"):
        cudnn_sdpa(*qkv(), **{name: given})


STRANGE: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("sparse", lambda t: t.to_sparse(), "a dense tensor, got a torch.sparse_coo one"),
    ("integers", lambda t: t.long(), "a floating-point dtype, got torch.int64"),
]


@pytest.mark.parametrize(("change", "text"), [s[1:] for s in STRANGE], ids=[s[0] for s in STRANGE])
def test_tensors_of_another_kind_are_named(change: Callable[[Tensor], Tensor], text: str) -> None:
    with pytest.raises(TypeError, match=f"^query must be (of )?{text}"):
        cudnn_sdpa(*(change(t) for t in qkv()))


@pytest.mark.parametrize("position", range(4))
def test_what_is_no_tensor_is_named(position: int) -> None:
    given: list[Any] = [*qkv(), None]
    require_tensors(*given)
    given[position] = [1.0]
    name = ("query", "key", "value", "attn_mask")[position]
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
        require_tensors(*given)


OK = qkv()
ERRORS: list[tuple[str, tuple[Any, ...], Options, type[Exception], list[str]]] = [
    (
        "dimensions",
        (OK[0], OK[1][0], OK[2], None),
        PLAIN,
        ValueError,
        ["same number of dimensions", "got 4, 3 and 4"],
    ),
    (
        "one dimension",
        (OK[0][0, 0, 0], OK[1][0, 0, 0], OK[2][0, 0, 0], None),
        PLAIN,
        ValueError,
        ["4 (B, H, S, D)", "got 1, 1 and 1"],
    ),
    (
        "dtypes",
        (OK[0], OK[1], OK[2].float(), None),
        PLAIN,
        TypeError,
        ["same dtype", "torch.float16, torch.float16 and torch.float32", "cast"],
    ),
    (
        "devices",
        (OK[0], OK[1], OK[2].to("meta"), None),
        PLAIN,
        RuntimeError,
        ["value must be on the device of query, cpu, got meta"],
    ),
    (
        "device of the mask",
        (*OK, torch.zeros(SQ, SKV, device="meta")),
        PLAIN,
        RuntimeError,
        ["attn_mask must be on the device of query, cpu, got meta"],
    ),
    (
        "head dimension",
        (OK[0], half(B, H, SKV, 8), OK[2], None),
        PLAIN,
        ValueError,
        ["query and key", "head dimension", "got 16 and 8"],
    ),
    (
        "lengths",
        (OK[0], OK[1], half(B, H, SKV + 1, D), None),
        PLAIN,
        ValueError,
        ["key and value", "length", f"got {SKV} and {SKV + 1}"],
    ),
    ("dropout below", (*OK, None), Options(dropout_p=-0.1), ValueError, ["dropout_p", "-0.1"]),
    ("dropout above", (*OK, None), Options(dropout_p=1.5), ValueError, ["[0, 1]", "1.5"]),
    ("dropout NaN", (*OK, None), Options(dropout_p=math.nan), ValueError, ["dropout_p", "nan"]),
    ("scale inf", (*OK, None), Options(scale=math.inf), ValueError, ["scale", "finite", "inf"]),
    ("scale NaN", (*OK, None), Options(scale=math.nan), ValueError, ["scale", "finite", "nan"]),
    (
        "batch",
        (OK[0], half(3, H, SKV, D), half(3, H, SKV, D), None),
        PLAIN,
        ValueError,
        ["must broadcast", "(2, 4), (3, 4), (3, 4)"],
    ),
    (
        "heads without the switch",
        (OK[0], half(B, 2, SKV, D), half(B, 2, SKV, D), None),
        PLAIN,
        ValueError,
        ["(2, 4), (2, 2), (2, 2)", "enable_gqa=True"],
    ),
    (
        "heads of key",
        (OK[0], half(B, 3, SKV, D), half(B, 2, SKV, D), None),
        GQA,
        ValueError,
        ["heads of key must divide", "got 3 and 4"],
    ),
    (
        "heads of value",
        (OK[0], half(B, 2, SKV, D), half(B, 8, SKV, D), None),
        GQA,
        ValueError,
        ["heads of value must divide", "got 8 and 4"],
    ),
    (
        "no heads",
        (OK[0], half(B, 0, SKV, D), half(B, 2, SKV, D), None),
        GQA,
        ValueError,
        ["heads of key", "got 0 and 4"],
    ),
    (
        "mask and causal",
        (*OK, torch.zeros(SQ, SKV)),
        Options(is_causal=True),
        RuntimeError,
        ["attn_mask must be None", "is_causal"],
    ),
    (
        "mask of integers",
        (*OK, torch.zeros(SQ, SKV, dtype=torch.int64)),
        PLAIN,
        TypeError,
        ["attn_mask must be bool, float32, float16, bfloat16 or of the dtype", "torch.int64"],
    ),
    (
        "mask of another length",
        (*OK, torch.zeros(SQ, SKV + 1)),
        PLAIN,
        ValueError,
        [f"broadcast to {SCORES}", f"got ({SQ}, {SKV + 1})"],
    ),
    (
        "mask larger than the scores",
        (half(B, H, 1, D), OK[1], OK[2], torch.zeros(SQ, SKV)),
        PLAIN,
        ValueError,
        [f"broadcast to {(B, H, 1, SKV)}", f"got ({SQ}, {SKV})"],
    ),
    (
        "mask of five dimensions",
        (*OK, torch.zeros(1, B, H, SQ, SKV)),
        PLAIN,
        ValueError,
        [f"broadcast to {SCORES}", f"got {(1, *SCORES)}"],
    ),
]


@pytest.mark.parametrize(
    ("tensors", "options", "error", "words"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_calls_that_mean_nothing_are_refused(
    tensors: tuple[Any, ...], options: Options, error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        validate(*tensors, options)
    assert type(caught.value) is error
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_masks_that_broadcast_are_accepted(shape: tuple[int, ...]) -> None:
    validate(*OK, torch.zeros(shape), PLAIN)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_the_bounds_of_dropout_are_accepted(p: float) -> None:
    validate(*OK, None, Options(dropout_p=p))


def test_broadcast_and_grouped_heads_are_accepted() -> None:
    validate(half(1, 1, SQ, D), OK[1], OK[2], None, PLAIN)
    validate(*qkv(heads=(6, 2, 3)), None, GQA)
    validate(OK[0][0], OK[1][0], OK[2][0], torch.zeros(H, SQ, SKV), PLAIN)


# ----------------------------------------------------------------------------- the parts


def whole_and_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp side by side, of the call and of its parts put together."""
    tensors = [t.double() for t in (query, key, value)]
    parts = split(*tensors, mask)
    assert parts is not None
    results = [attention(*half_call) for half_call in parts.halves]
    assert len(results) == 2
    assert all(r[0].numel() for r in results)
    joined = [parts.join(list(side)) for side in zip(*results, strict=True)]
    whole = attention(*tensors, mask)
    return torch.cat([whole[0], whole[1][..., None]], -1), torch.cat(
        [joined[0], joined[1][..., None]], -1
    )


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("shape", [None, (SQ, SKV), (H, 1, SKV), (-1, 1, SQ, SKV), (1, H, SQ, 1)])
def test_parts_over_the_batch(batch: int, shape: tuple[int, ...] | None) -> None:
    mask = None
    if shape is not None:
        mask = torch.randn([batch if n == -1 else n for n in shape])
    whole, parts = whole_and_parts(*qkv(batch), mask)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [(4, 4, 4), (5, 5, 5), (8, 2, 2), (6, 3, 3), (12, 2, 6)])
@pytest.mark.parametrize("masked", ["no", "all heads", "each head"])
@pytest.mark.parametrize("ndim", [3, 4])
def test_parts_over_the_heads(heads: tuple[int, int, int], masked: str, ndim: int) -> None:
    tensors = qkv(1, heads)
    mask = {
        "no": None,
        "all heads": torch.randn(1, SQ, SKV),
        "each head": torch.randn(heads[0], SQ, SKV),
    }[masked]
    if ndim == 3:
        tensors = (tensors[0][0], tensors[1][0], tensors[2][0])
    whole, parts = whole_and_parts(*tensors, mask)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_parts_of_a_broadcast_batch() -> None:
    parts = split(half(1, H, SQ, D), half(5, H, SKV, D), half(1, H, SKV, D), None)
    assert parts is not None
    assert [[t.shape[0] for t in h[:3]] for h in parts.halves] == [[1, 2, 1], [1, 3, 1]]


def test_calls_that_have_no_parts() -> None:
    assert split(*qkv(1, (1, 1, 1)), None) is None
    assert split(*qkv(1, (6, 2, 3)), None) is None  # no boundary of groups of 3 and of 2


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
def test_parts_are_joined_in_their_order_in_memory(order: tuple[int, ...]) -> None:
    parts = split(*qkv(4), None)
    assert parts is not None
    whole = half(4, H, SQ, D)
    halves = [in_order(t.contiguous(), order) for t in whole.chunk(2)]
    joined = parts.join(halves)
    assert torch.equal(joined, whole)
    assert joined.permute(order).is_contiguous()


# ----------------------------------------------------------------------------- the specs


def test_forward_spec_says_all_of_the_call() -> None:
    query, key, value = qkv(heads=(6, 2, 3), dims=(24, 32))
    query = in_order(query, (0, 2, 1, 3))
    options = Options(dropout_p=0.25, enable_gqa=True)
    mask = torch.zeros(B, 1, 1, SKV)
    spec = forward_spec(prepare(query, key, value, mask, options), options, 0.5, lse=True)
    assert spec.direction is Direction.FORWARD
    assert spec.query == TensorSpec((B, 6, SQ, 24), (SQ * 6 * 24, 24, 6 * 24, 1), "float16")
    assert spec.key == TensorSpec((B, 2, SKV, 24), (2 * SKV * 24, SKV * 24, 24, 1), "float16")
    assert spec.output == TensorSpec((B, 6, SQ, 32), (SQ * 6 * 32, 32, 6 * 32, 1), "float16")
    assert spec.bias == TensorSpec((B, 1, SQ, SKV), (SKV, SKV, 0, 1), "float32")
    assert (spec.scale, spec.dropout_p, spec.lse, spec.causal) == (0.5, 0.25, True, False)
    assert forward_spec(prepare(*qkv(), None, PLAIN), Options(is_causal=True), 1, lse=False).causal


def test_backward_spec_follows_the_forward() -> None:
    mask = torch.zeros(1, H, SQ, SKV)
    inputs = prepare(*qkv(), mask, PLAIN)
    forward = forward_spec(inputs, Options(dropout_p=0.5), 0.5, lse=True)
    given = TensorSpec(forward.output.shape, (0, D, H * D, 1), "float16")
    spec = backward_spec(forward, given, bias_gradient=True, deterministic=True)
    assert spec.direction is Direction.BACKWARD
    same = ("query", "key", "value", "output", "bias", "scale", "causal", "dropout_p")
    assert [getattr(spec, name) for name in same] == [getattr(forward, name) for name in same]
    assert spec.grad_output == given
    assert (spec.grad_query, spec.grad_key) == (forward.query, forward.key)
    assert spec.grad_value == forward.value
    shape = (1, H, SQ, SKV)
    assert spec.grad_bias == TensorSpec(shape, contiguous_stride(shape), "float16")
    assert spec.deterministic
    assert not spec.lse
    without = backward_spec(forward, given, bias_gradient=False, deterministic=False)
    assert without.grad_bias is None
    assert not without.deterministic


def test_a_repeated_query_has_a_gradient_of_its_own_layout() -> None:
    inputs = prepare(half(1, H, SQ, D), half(B, H, SKV, D), half(B, H, SKV, D), None, PLAIN)
    forward = forward_spec(inputs, PLAIN, 0.5, lse=True)
    spec = backward_spec(forward, forward.output, bias_gradient=False, deterministic=False)
    assert forward.query.stride[0] == 0
    assert spec.grad_query == TensorSpec((B, H, SQ, D), (H * SQ * D, SQ * D, D, 1), "float16")


def test_layouts_name_strides_in_one_way() -> None:
    single = torch.empty(4096).half().as_strided((B, 1, SQ, D), (SQ * D, 7, D, 1))
    assert layout_of(single) == TensorSpec((B, 1, SQ, D), (SQ * D, SQ * D, D, 1), "float16")
    assert layout_of(torch.zeros(2, 3)).dtype == "float32"


def test_what_is_half() -> None:
    assert is_half(torch.float16)
    assert is_half(torch.bfloat16)
    assert not any(is_half(t) for t in (torch.float32, torch.float64, torch.int8, torch.bool))
