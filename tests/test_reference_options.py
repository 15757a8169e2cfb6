"""Lengths, alignment, window, softcap, ALiBi and sinks of the reference, by other means."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import reference
from cudnn_mha.reference import alibi_slopes, attention
from tests.test_reference import (
    SKV,
    SQ,
    B,
    D,
    H,
    equal,
    gradients,
    inputs,
    normal,
    oracle,
    same_as_autograd,
    torch_math,
)

WINDOWS = [None, (2, -1), (-1, 1), (1, 2), (0, 0)]
LENS_Q, LENS_KV = torch.tensor([5, 3]), torch.tensor([4, 7])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def sink_logits() -> Tensor:
    return normal(H)


def slopes() -> Tensor:
    return alibi_slopes(H) * 1.5


def geometry(
    b: int,
    sq: int,
    skv: int,
    *,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    bottom_right: bool = False,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Distances and what is visible, ``(B, 1, Sq, Skv)``, from the words of the documentation."""
    distance = torch.zeros(b, 1, sq, skv, dtype=torch.float64)
    visible = torch.zeros(b, 1, sq, skv, dtype=torch.bool)
    for n in range(b):
        len_q = sq if seq_lens_q is None else int(seq_lens_q[n])
        len_kv = skv if seq_lens_kv is None else int(seq_lens_kv[n])
        for i, j in itertools.product(range(sq), range(skv)):
            d = i - j + (len_kv - len_q if bottom_right else 0)
            left, right = window or (-1, -1)
            distance[n, 0, i, j] = abs(d)
            visible[n, 0, i, j] = (
                i < len_q
                and j < len_kv
                and not (is_causal and d < 0)
                and not (left >= 0 and d > left)
                and not (right >= 0 and -d > right)
            )
    return distance, visible


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = D**-0.5,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **masks: Any,
) -> tuple[Tensor, Tensor]:
    """The sink as one more column of the scores; torch.softmax and torch.logsumexp."""
    b, h, sq, _ = q.shape
    k, v = (t.repeat_interleave(h // t.size(1), 1) for t in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    distance, visible = geometry(b, sq, k.size(2), **masks)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance
    scores = scores.masked_fill(~visible, -math.inf)
    column = scores.new_full((b, h, sq, 1), -math.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(b, h, sq, 1)
        if masks.get("seq_lens_q") is not None:
            padding = torch.arange(sq) >= masks["seq_lens_q"][:, None]
            column = column.masked_fill(padding[:, None, :, None], -math.inf)
    scores = torch.cat([scores, column], -1)
    dead = (scores == -math.inf).all(-1)
    scores = scores.masked_fill(dead.unsqueeze(-1), 0.0)  # else NaN gradients
    weights = torch.softmax(scores, -1).masked_fill(dead.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(dead, -math.inf)
    return weights[..., :-1] @ v, lse


def finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)


# --- every combination


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_combinations_equal_what_is_built_by_hand(
    window: tuple[int, int] | None, is_causal: bool, bottom_right: bool
) -> None:
    fixed = {"window": window, "is_causal": is_causal, "bottom_right": bottom_right}
    lengths: list[dict[str, Any]] = [{}, {"seq_lens_q": LENS_Q, "seq_lens_kv": LENS_KV}]
    for lens, softcap, (alibi, with_sinks, with_bias) in itertools.product(
        lengths, (None, 0.8), itertools.product((False, True), repeat=3)
    ):
        q, k, v = inputs(hk=2, hv=1)
        bias = normal(H, SQ, SKV) if with_bias else None
        options: dict[str, Any] = {
            **fixed,
            **lens,
            "softcap": softcap,
            "alibi_slopes": slopes() if alibi else None,
            "sinks": sink_logits() if with_sinks else None,
        }
        got, want = oracle(q, k, v, bias, **options), by_hand(q, k, v, bias, **options)
        equal(got, want)
        leaves = [t for t in (q, k, v, bias, options["sinks"]) if t is not None]
        loss, wanted = (
            torch.cat([out.flatten(), finite(lse).flatten()]) for out, lse in (got, want)
        )
        equal(gradients(loss, *leaves), gradients(wanted, *leaves))
        same_as_autograd(q, k, v, bias, **options)


def test_a_mask_and_dropout_join_every_option() -> None:
    q, k, v = inputs()
    mask, keep, p = torch.rand(B, 1, SQ, SKV) < 0.7, torch.rand(H, SQ, SKV) < 0.6, 0.4
    options: dict[str, Any] = {
        "seq_lens_q": LENS_Q,
        "seq_lens_kv": LENS_KV,
        "bottom_right": True,
        "is_causal": True,
        "window": (4, -1),
        "softcap": 0.8,
        "alibi_slopes": slopes(),
        "sinks": sink_logits(),
    }
    bias = torch.zeros(B, 1, SQ, SKV).double().masked_fill(~mask, -math.inf)
    # One-hot values show the weights, so that dropping can be done outside.
    eye = torch.eye(SKV, dtype=torch.float64).expand(B, H, SKV, SKV)
    weights, want_lse = by_hand(q, k, eye, bias, **options)
    want = (weights * keep / (1 - p)) @ v
    dropout: dict[str, Any] = {"dropout_p": p, "dropout_mask": keep}
    out, lse = oracle(q, k, v, mask, **options, **dropout)
    equal((out, lse), (want, want_lse))
    leaves = (q, k, v, options["sinks"])
    equal(gradients(out, *leaves), gradients(want, *leaves))
    same_as_autograd(q, k, v, mask, **options, **dropout)


# --- against other implementations


FLEX_CASES: dict[str, dict[str, Any]] = {
    "window": {"window": (2, 1)},
    "causal window": {"window": (2, -1), "is_causal": True},
    "bottom right": {"is_causal": True, "bottom_right": True},
    "lengths": {"seq_lens_q": LENS_Q, "seq_lens_kv": LENS_KV},
    "alibi": {"alibi_slopes": True, "is_causal": True},
    "softcap": {"softcap": 0.5},
    "all": {
        "window": (3, 2),
        "bottom_right": True,
        "seq_lens_q": LENS_Q,
        "seq_lens_kv": LENS_KV,
        "alibi_slopes": True,
        "softcap": 0.5,
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("case", FLEX_CASES)
def test_flex_attention(case: str, dtype: torch.dtype, tolerance: float) -> None:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    options = dict(FLEX_CASES[case])
    slope = slopes() if options.pop("alibi_slopes", False) else torch.zeros(H)
    lens_q = options.get("seq_lens_q", torch.full((B,), SQ))
    lens_kv = options.get("seq_lens_kv", torch.full((B,), SKV))
    shift = (lens_kv - lens_q) * options.get("bottom_right", False)
    left, right = options.get("window", (-1, -1))
    left, right = (side if side >= 0 else SQ + SKV for side in (left, right))
    right = min(right, 0) if options.get("is_causal") else right
    cap: float | None = options.get("softcap")

    def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if cap is None else cap * torch.tanh(score / cap)
        penalty: Tensor = slope[h] * (i + shift[b] - j).abs()
        return score - penalty

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = j - i - shift[b]
        real: Tensor = (i < lens_q[b]) & (j < lens_kv[b])
        near: Tensor = (ahead <= right) & (ahead >= -left)
        return real & near

    q, k, v = (t.detach().to(dtype) for t in inputs(hk=2, hv=2))
    want, aux = flex_attention(
        q,
        k,
        v,
        score_mod=modified,
        block_mask=create_block_mask(visible, B, None, SQ, SKV, device="cpu"),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    out, lse = attention(q, k, v, alibi_slopes=slope, **options)
    assert isinstance(aux.lse, Tensor)
    equal(out, want, tolerance)
    equal(lse, aux.lse.to(dtype), 2e-6)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("bottom_right", [False, True])
def test_torch_math_with_the_sink_as_a_key_of_zeros(
    window: tuple[int, int] | None, bottom_right: bool
) -> None:
    """PyTorch's kernel, given one more key, of value 0, whose bias is the sink."""
    q, k, v = inputs()
    sinks = sink_logits()
    masks: dict[str, Any] = {"window": window, "bottom_right": bottom_right}
    distance, visible = geometry(B, SQ, SKV, **masks)
    bias = -slopes().double()[:, None, None] * distance
    bias = bias.masked_fill(~visible, -math.inf)
    bias = torch.cat([bias, sinks[:, None, None].expand(B, H, SQ, 1)], -1)
    longer_k, longer_v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
    want = torch_math(q, longer_k, longer_v, attn_mask=bias)
    out, _ = oracle(q, k, v, alibi_slopes=slopes(), sinks=sinks, **masks)
    equal(out, want)
    leaves = (q, k, v, sinks)
    equal(gradients(out, *leaves), gradients(want, *leaves))


@pytest.mark.parametrize("sq,skv", [(5, 5), (3, 7), (7, 3), (1, 7)])
def test_bottom_right_causality_in_torch_math(sq: int, skv: int) -> None:
    q, k, v = inputs(sq=sq, skv=skv)
    mask = torch.ones(sq, skv, dtype=torch.bool).tril(skv - sq)
    want = torch_math(q, k, v, attn_mask=mask)
    out, lse = oracle(q, k, v, is_causal=True, bottom_right=True)
    equal(out, want)
    equal(gradients(out, q, k, v), gradients(want, q, k, v))
    # Leading queries that lie before the first key.
    early = max(sq - skv, 0)
    assert torch.all(out[:, :, :early] == 0) and torch.all(lse[:, :, :early] == -math.inf)
    assert lse[:, :, early:].isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.7},
        {"sinks": "leaf"},
        {"alibi_slopes": "leaf"},
        {"window": (1, 0), "bottom_right": True},
        {"is_causal": True, "bottom_right": True},
        {"seq_lens_q": torch.tensor([2, 0]), "seq_lens_kv": torch.tensor([3, 4])},
        {
            "softcap": 0.7,
            "sinks": "leaf",
            "alibi_slopes": "leaf",
            "window": (2, 1),
            "bottom_right": True,
            "seq_lens_q": torch.tensor([2, 3]),
            "seq_lens_kv": torch.tensor([1, 4]),
        },
    ],
    ids=lambda o: "-".join(o),
)
def test_gradcheck(options: dict[str, Any]) -> None:
    leaves = {name: normal(2) for name, given in options.items() if isinstance(given, str)}
    q, k, v = normal(2, 2, 3, 2), normal(2, 1, 4, 2), normal(2, 2, 4, 2)

    def both(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = oracle(q, k, v, **{**options, **dict(zip(leaves, given, strict=True))})
        return out, finite(lse)

    assert torch.autograd.gradcheck(both, (q, k, v, *leaves.values()))


# --- lengths


OPTIONS_BESIDE_LENGTHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "bottom_right": True},
    "window": {"window": (1, 1)},
    "everything": {
        "window": (2, -1),
        "is_causal": True,
        "bottom_right": True,
        "softcap": 0.7,
        "alibi_slopes": alibi_slopes(H),
        "sinks": torch.linspace(-1, 1, H, dtype=torch.float64),
        "dropout_p": 0.3,
        "dropout_mask": torch.arange(SQ * SKV).view(SQ, SKV) % 3 != 0,
    },
}


@pytest.mark.parametrize("case", OPTIONS_BESIDE_LENGTHS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("lens", [((5, 3), (4, 7)), ((2, 0), (3, 7)), ((5, 4), (0, 2))])
def test_padding_is_nothing_whatever_it_holds(
    lens: tuple[tuple[int, int], tuple[int, int]], poison: float, case: str
) -> None:
    """A padded batch equals its sequences one by one; padding gives zeros everywhere."""
    options = dict(OPTIONS_BESIDE_LENGTHS[case])
    if "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
    q, k, v = (t.detach() for t in inputs(hk=2, hv=1))
    up, up_lse = normal(B, H, SQ, D + 2, grad=False), normal(B, H, SQ, grad=False)
    for n, (rows, keys) in enumerate(zip(*lens, strict=True)):
        for t, real in ((q, rows), (k, keys), (v, keys), (up, rows)):
            t[n, :, real:] = poison
        up_lse[n, :, rows:] = poison
    leaves = [t.requires_grad_() for t in (q, k, v)]
    sinks = [options["sinks"]] if "sinks" in options else []
    seq_lens: dict[str, Any] = {
        "seq_lens_q": torch.tensor(lens[0], dtype=torch.int32),
        "seq_lens_kv": torch.tensor(lens[1]),
    }
    out, lse = oracle(*leaves, **options, **seq_lens)
    grads = torch.autograd.grad((out, lse), (*leaves, *sinks), (up, up_lse), retain_graph=True)
    of_out = torch.autograd.grad(out, (*leaves, *sinks), up)
    found = reference.gradients(up, *leaves, out, lse, **options, **seq_lens)
    equal(tuple(t.detach() for t in found[:3]), of_out[:3])
    if sinks:
        equal(found[4].detach(), of_out[3])

    sink_grads = torch.zeros(H, dtype=torch.float64)
    for n, (rows, keys) in enumerate(zip(*lens, strict=True)):
        own = dict(options)
        if "dropout_mask" in own:
            own["dropout_mask"] = own["dropout_mask"][:rows, :keys]
        parts = [t[n : n + 1, :, :real] for t, real in zip(leaves, (rows, keys, keys), strict=True)]
        want, want_lse = oracle(*parts, **own)
        equal((out[n, :, :rows], lse[n, :, :rows]), (want[0], want_lse[0]))
        assert torch.all(out[n, :, rows:] == 0) and torch.all(lse[n, :, rows:] == -math.inf)
        want_grads = torch.autograd.grad(
            (want, want_lse),
            (*parts, *sinks),
            (up[n : n + 1, :, :rows], up_lse[n : n + 1, :, :rows]),
            allow_unused=True,
        )
        for grad, wanted, real in zip(grads, want_grads, (rows, keys, keys), strict=False):
            equal(
                grad[n, :, :real],
                torch.zeros_like(grad[n, :, :real]) if wanted is None else wanted[0],
            )
            assert torch.all(grad[n, :, real:] == 0)
        if sinks:
            sink_grads += want_grads[3]
    if sinks:
        equal(grads[3], sink_grads)


def test_gradients_do_not_read_what_the_forward_left_in_padding() -> None:
    q, k, v = inputs()
    sinks = sink_logits()
    options: dict[str, Any] = {"seq_lens_q": LENS_Q, "seq_lens_kv": LENS_KV, "sinks": sinks}
    up = normal(B, H, SQ, D + 2, grad=False)
    out, lse = (t.detach() for t in oracle(q, k, v, **options))
    want = reference.gradients(up, q, k, v, out, lse, **options)
    padding = torch.arange(SQ) >= LENS_Q[:, None]
    for poison in (math.nan, math.inf, 0.0):
        spoilt_up, spoilt_q, spoilt_out = (
            t.masked_fill(padding[:, None, :, None], poison) for t in (up, q, out)
        )
        spoilt_lse = lse.masked_fill(padding[:, None], poison)
        got = reference.gradients(spoilt_up, spoilt_q, k, v, spoilt_out, spoilt_lse, **options)
        equal(got, want)
    assert all(t.isfinite().all() for t in want)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding_of_a_bias_is_nothing(poison: float) -> None:
    q, k, v = inputs()
    lens: dict[str, Any] = {"seq_lens_q": LENS_Q, "seq_lens_kv": LENS_KV}
    _, real = geometry(B, SQ, SKV, **lens)
    clean = normal(B, H, SQ, SKV, grad=False)
    found = []
    for bias in (clean, clean.masked_fill(~real, poison)):
        bias.requires_grad_()
        out, lse = oracle(q, k, v, bias, **lens)
        grads = gradients(out, q, k, v, bias)
        up = torch.ones_like(out)
        found.append((out, lse, *grads, *reference.gradients(up, q, k, v, out, lse, bias, **lens)))
    equal(found[1], found[0])
    assert torch.all(found[1][5][~real.expand(B, H, SQ, SKV)] == 0)
    assert torch.all(found[1][9][~real.expand(B, H, SQ, SKV)] == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_of_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (t.detach().to(dtype) for t in inputs())
    q[1, :, 3:], k[0, :, 4:], v[0, :, 4:] = math.nan, math.inf, -math.inf
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, seq_lens_q=LENS_Q, seq_lens_kv=LENS_KV)
    assert out.dtype == dtype and torch.all(out[1, :, 3:] == 0)
    assert torch.all(lse[1, :, 3:] == -math.inf)
    up = torch.ones_like(out)
    up[1, :, 3:] = math.nan
    grads = torch.autograd.grad(out, leaves, up)
    assert all(grad.isfinite().all() and grad.ne(0).any() for grad in grads)
    assert torch.all(grads[0][1, :, 3:] == 0)
    assert torch.all(grads[1][0, :, 4:] == 0) and torch.all(grads[2][0, :, 4:] == 0)


def test_lengths_of_one_side_only() -> None:
    q, k, v = inputs()
    every_q, every_kv = torch.full((B,), SQ), torch.full((B,), SKV)
    for given in ({"seq_lens_q": LENS_Q}, {"seq_lens_kv": LENS_KV}):
        full: dict[str, Any] = {"seq_lens_q": every_q, "seq_lens_kv": every_kv, **given}
        for bottom_right in (False, True):
            aligned: dict[str, Any] = {"is_causal": True, "bottom_right": bottom_right}
            equal(oracle(q, k, v, **given, **aligned), by_hand(q, k, v, **full, **aligned))


def test_lengths_without_batch_and_with_more_of_it() -> None:
    q, k, v = inputs()
    wide: dict[str, Any] = {"is_causal": True, "bottom_right": True, "sinks": sink_logits()}
    want, want_lse = oracle(q, k, v, seq_lens_q=LENS_Q, seq_lens_kv=LENS_KV, **wide)
    for n in range(B):
        lens = {"seq_lens_q": LENS_Q[n], "seq_lens_kv": LENS_KV[n]}
        equal(oracle(q[n], k[n], v[n], **lens, **wide), (want[n], want_lse[n]))
    # Key and value broadcast: each sequence sees as much of the one key as its length says.
    shared = k[:1], v[:1]
    lens_kv = torch.tensor([[3, 6], [0, 7], [1, 2]])
    out, lse = oracle(q.expand(3, *q.shape), *shared, seq_lens_kv=lens_kv, **wide)
    for m, n in itertools.product(range(3), range(B)):
        one = oracle(q[n], k[0], v[0], seq_lens_kv=lens_kv[m, n], **wide)
        equal((out[m, n], lse[m, n]), one)


def test_rows_before_the_first_key_of_their_sequence() -> None:
    """Bottom-right with more queries than keys, by lengths: zeros, -inf, no gradient."""
    q, k, v = inputs()
    lens_q, lens_kv = torch.tensor([5, 4]), torch.tensor([2, 4])
    options: dict[str, Any] = {"is_causal": True, "bottom_right": True}
    out, lse = oracle(q, k, v, seq_lens_q=lens_q, seq_lens_kv=lens_kv, **options)
    assert (lse == -math.inf).any(1).tolist() == [
        [True, True, True, False, False],
        [False, False, False, False, True],
    ]
    dead = lse == -math.inf
    assert torch.all(out[dead] == 0) and torch.all(out[~dead] != 0)
    grad_q, grad_k = torch.autograd.grad((out, lse), (q, k), (torch.ones_like(out), lse * 0 + 1))
    assert torch.all(grad_q[dead] == 0) and grad_k.isfinite().all()


# --- window, softcap, ALiBi, sinks


def test_window_counts_keys_on_either_side() -> None:
    q, k, v = inputs(sq=6, skv=6)
    weights, _ = oracle(q, k, torch.eye(6).double().expand(B, H, 6, 6), window=(2, 1))
    offset = torch.arange(6) - torch.arange(6)[:, None]  # j - i
    assert torch.equal(weights[0, 0] != 0, (offset >= -2) & (offset <= 1))
    equal(oracle(q, k, v, window=(-1, 0)), oracle(q, k, v, is_causal=True))
    equal(oracle(q, k, v, window=(-1, -1)), oracle(q, k, v))
    equal(oracle(q, k, v, window=(1, 3), is_causal=True), oracle(q, k, v, window=(1, 0)))


def test_softcap_bounds_the_scores() -> None:
    q = torch.tensor([1e4, 1.0]).view(1, 1, 2, 1)
    k = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    _, lse = attention(q, k, k, softcap=3.0)
    want = [math.log(math.exp(x) + math.exp(-x)) for x in (3.0, 3 * math.tanh(1 / 3))]
    equal(lse.flatten(), torch.tensor(want), 1e-6)
    # Above the cap the bias still moves the score: it comes after.
    _, biased = attention(q, k, k, torch.tensor(5.0), softcap=3.0)
    equal(biased, lse + 5, 1e-6)


@pytest.mark.parametrize(
    "heads,exponents",
    [
        (1, [8]),
        (2, [4, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (16, [k / 2 for k in range(1, 17)]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (3, [4, 8, 2]),
        (7, [2, 4, 6, 8, 1, 3, 5]),
    ],
)
def test_alibi_slopes_of_the_paper(heads: int, exponents: list[float]) -> None:
    found = alibi_slopes(heads)
    assert found.dtype == torch.float32
    equal(found, torch.tensor([2.0**-e for e in exponents]), 1e-7)


def test_alibi_slopes_lie_on_the_device() -> None:
    assert alibi_slopes(6, device="meta").device.type == "meta"
    with pytest.raises(ValueError, match=r"^`heads` must be at least 1, got 0; "):
        alibi_slopes(0)


def test_alibi_penalizes_distance_on_both_sides() -> None:
    q, k, v = torch.zeros(1, 2, 3, 1), torch.zeros(1, 2, 4, 1), torch.eye(4).expand(1, 2, 4, 4)
    slope = torch.tensor([0.5, 2.0])
    for bottom_right, shift in ((False, 0), (True, 1)):
        out, _ = attention(q, k, v, alibi_slopes=slope, bottom_right=bottom_right)
        steps = torch.tensor([[abs(i + shift - j) for j in range(4)] for i in range(3)])
        equal(out[0], torch.softmax(-slope[:, None, None] * steps, -1), 1e-6)


def test_sink_of_a_row_without_keys_is_its_lse() -> None:
    q, k, v = inputs()
    sinks = sink_logits()
    hidden = torch.zeros(SQ, SKV, dtype=torch.bool)
    hidden[0] = True
    out, lse = oracle(q, k, v, hidden, sinks=sinks)
    assert torch.all(out[:, :, 1:] == 0)
    assert torch.equal(lse[:, :, 1:], sinks[:, None].expand(B, H, SQ - 1))
    equal(torch.autograd.grad(lse[:, :, 1:].sum(), sinks, retain_graph=True)[0], 0 * sinks + 8)
    grads = torch.autograd.grad(out[:, :, 1:].sum(), (q, k, v, sinks), retain_graph=True)
    assert all(torch.all(grad == 0) for grad in grads)
    # No keys at all, and lengths of zero.
    empty, empty_lse = oracle(q, k[:, :, :0], v[:, :, :0], sinks=sinks)
    none = torch.zeros(B, dtype=torch.int64)
    for got, got_lse in ((empty, empty_lse), oracle(q, k, v, seq_lens_kv=none, sinks=sinks)):
        assert torch.all(got == 0) and torch.equal(got_lse, sinks[:, None].expand(B, H, SQ))


@pytest.mark.parametrize("size", [200.0, 1e4, -1e4])
def test_extreme_sinks(size: float) -> None:
    """Neither side of the sum overflows, or is lost."""
    q, k, v = (t.detach().float() for t in inputs())
    sinks = torch.full((H,), size, requires_grad=True)
    out, lse = attention(q, k, v, sinks=sinks)
    plain, plain_lse = attention(q, k, v)
    if size > 0:
        assert torch.all(out == 0) and torch.all(lse == size)
    else:
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    grad = torch.autograd.grad(lse.sum(), sinks)[0]
    equal(grad, torch.full((H,), float(B * SQ * (size > 0))), 0.0)


def test_sink_of_minus_infinity_is_none() -> None:
    q, k, v = inputs()
    sinks = torch.full((H,), -math.inf, dtype=torch.float64, requires_grad=True)
    hidden = torch.rand(SQ, SKV) < 0.5
    hidden[2] = False
    out, lse = oracle(q, k, v, hidden, sinks=sinks)
    equal((out, lse), oracle(q, k, v, hidden))
    assert torch.all(lse[:, :, 2] == -math.inf)
    for grad in torch.autograd.grad(out.sum() + finite(lse).sum(), (q, k, v, sinks)):
        assert grad.isfinite().all()


# --- where it runs, and what it refuses


def test_lengths_are_never_read_on_the_host() -> None:
    """Tensors on meta have no values: reading one raises."""
    q, k, v = (t.detach().to("meta").requires_grad_() for t in inputs(hk=2, hv=1))
    lens = torch.zeros(B, dtype=torch.int32, device="meta")
    options: dict[str, Any] = {
        "seq_lens_q": lens,
        "seq_lens_kv": lens,
        "bottom_right": True,
        "is_causal": True,
        "window": (3, 1),
        "softcap": 2.0,
        "alibi_slopes": alibi_slopes(H, "meta"),
        "sinks": torch.zeros(H, device="meta"),
    }
    out, lse = attention(q, k, v, **options)
    assert (out.shape, lse.shape) == ((B, H, SQ, D + 2), (B, H, SQ))
    found = reference.gradients(out, q, k, v, out, lse, **options)
    assert [t.shape for t in found] == [q.shape, k.shape, v.shape, (B, H, SQ, SKV), (H,)]


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"seq_lens_q": torch.ones(B)}, "seq_lens_q"),
        ({"seq_lens_q": torch.ones(B + 1, dtype=torch.int32)}, "seq_lens_q"),
        ({"seq_lens_kv": torch.ones(B, dtype=torch.bool)}, "seq_lens_kv"),
        ({"seq_lens_kv": torch.ones(B, 1, 1, dtype=torch.int64)}, "seq_lens_kv"),
        ({"window": (-2, 0)}, "window"),
        ({"window": (0,)}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": math.inf}, "softcap"),
        ({"softcap": math.nan}, "softcap"),
        ({"alibi_slopes": torch.ones(H + 1)}, "alibi_slopes"),
        ({"alibi_slopes": torch.ones(B, H)}, "alibi_slopes"),
        ({"alibi_slopes": torch.ones(H, dtype=torch.int32)}, "alibi_slopes"),
        ({"sinks": torch.ones(1)}, "sinks"),
        ({"sinks": torch.ones(H, dtype=torch.int64)}, "sinks"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], name: str) -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=rf"^`{name}` must be .*, got .*; "):
        attention(q, k, v, **changes)
