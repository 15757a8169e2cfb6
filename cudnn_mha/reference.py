"""Scaled dot-product attention from its definition, in plain PyTorch, on any device.

The oracle that the tests compare with, and the last fallback. It shares no code with the rest of
the package, so that it cannot share a mistake with it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    bottom_right: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    compute_dtype: torch.dtype | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attention of every query row over all keys, and the log-sum-exp of its scores.

    For query row ``i`` of query head ``h``, with ``k`` and ``v`` the key and value heads it uses::

        d(i, j) = i + shift - j       shift = len_kv - len_q if bottom_right, else 0
        p[j] = score_mod(scale * <q[i], k[j]>, i, j)
        c[j] = softcap * tanh(p[j] / softcap)         p[j] without a softcap
        s[j] = c[j] + bias[i, j] - alibi_slopes[h] * |d(i, j)|    -inf where key j is hidden
        lse  = log(exp(sinks[h]) + sum_j exp(s[j]))   natural logarithm
        out  = sum_j exp(s[j] - lse) * drop[i, j] * v[j]

    This is eq. 1 of Vaswani et al., "Attention Is All You Need" (2017), with the masks of its
    section 3.2.3; grouped heads as in Ainslie et al., "GQA" (2023): head ``h`` reads key head
    ``h // (Hq // Hk)`` and value head ``h // (Hq // Hv)``. ``drop`` is 0 or ``1 / (1 - dropout_p)``
    (Srivastava et al., "Dropout", 2014, scaled while training). Alignment and window are counted
    as by FlashAttention (Dao, 2023), which also made ALiBi (Press et al., "Train Short, Test
    Long", 2022) symmetric in ``d``; softcap as in "Gemma 2" (2024); sinks after Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks" (2024), learned as in gpt-oss.
    A row that may attend to nothing gives zeros, an LSE of -inf, and zero gradients; with a sink
    it gives zeros and the sink as LSE. Autograd differentiates both results.

    Args:
        query: ``(..., Hq, Sq, Dqk)``. The leading batch dimensions of all inputs broadcast.
        key: ``(..., Hk, Skv, Dqk)``; ``Hk`` divides ``Hq``.
        value: ``(..., Hv, Skv, Dv)``; ``Hv`` divides ``Hq`` and may differ from ``Hk``.
        attn_mask: broadcastable to ``(..., Hq, Sq, Skv)``. Boolean: True = attend. Floating
            point: the bias, added in the compute dtype; -inf there hides the key.
        dropout_p: probability of dropping a weight, from 0 to 1. The LSE never includes dropout.
        is_causal: hides keys with ``d(i, j) < 0``.
        scale: factor on the products; ``1 / sqrt(Dqk)`` by default.
        seq_lens_q, seq_lens_kv: integer, broadcastable to the batch dimensions, ``(B,)`` for 4-D
            inputs: how many leading rows of query, or of key and value, are real; from 0 to their
            length, which is not checked (that would wait for the device), and all by default.
            Later rows are padding: whatever they, a bias there and their upstream gradients
            hold, NaN and inf included, they take no part; their outputs are zeros, their LSE is
            -inf, and all gradients there are zeros.
        bottom_right: aligns causality, window and ALiBi with the last real query and key.
        window: ``(left, right)``: hides keys with ``d > left`` and ``d < -right``; -1 = open.
        softcap: above 0, bounds the scaled products.
        alibi_slopes: ``(Hq,)`` floating point, such as `alibi_slopes` gives.
        sinks: ``(Hq,)`` floating point: logits that take part in every row's softmax but carry
            no value.
        score_mod: from the scaled products ``(..., Hq, Sq, Skv)`` and the indices ``(Sq, 1)`` and
            ``(Skv,)`` of queries and keys, which are of their dtype, to what takes their place.
        compute_dtype: dtype of all arithmetic; default float32, or float64 for a float64 query.
            Autocast does not change it; torch's float32 matmul precision settings do apply.
        dropout_mask: boolean, broadcastable like ``attn_mask``, True = keep: used in place of a
            drawn one.

    Returns:
        The output ``(..., Hq, Sq, Dv)``, in ``compute_dtype`` if that was given, else in the dtype
        of ``query``, its dimensions ordered in memory as those of ``query``; and the LSE
        ``(..., Hq, Sq)`` in float32, or float64 if ``compute_dtype`` is.

    Raises:
        ValueError: for arguments that do not fit together.
    """
    _check(query, key, value, attn_mask, dropout_p, dropout_mask)
    _check_options(query.size(-3), seq_lens_q, seq_lens_kv, window, softcap, alibi_slopes, sinks)
    dtype = compute_dtype or torch.promote_types(query.dtype, torch.float32)
    heads, queries, head_dim = query.shape[-3:]
    keys = key.size(-2)
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    score_shape = torch.Size((*batch, heads, queries, keys))
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    scoring = _Scoring(
        score_shape,
        query.device,
        attn_mask,
        is_causal,
        seq_lens_q,
        seq_lens_kv,
        bottom_right,
        window,
        softcap,
        alibi_slopes,
        score_mod,
    )
    real_queries, real_keys = scoring.real_queries(), scoring.real_keys()
    key, value = _only(real_keys, key), _only(real_keys, value)

    # Autocast would silently compute the products in half precision. It does not know "meta".
    exact: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if query.device.type != "meta":
        exact = torch.autocast(query.device.type, enabled=False)
    with exact:
        # Scaling the query, not the scores: linear work, and no overflow that the scale prevents.
        q = _only(real_queries, query).to(dtype) * scale
        q = q.expand(*batch, heads, queries, head_dim)
        scores = scoring.scores(q @ _per_query_head(key.to(dtype), heads).mT)
        sink = None if sinks is None else sinks.to(dtype).view(heads, 1, 1)

        # Neither result depends on the shift, so it needs no gradient. Rows without a key shift
        # by zero: -inf minus -inf would be NaN. amax refuses to reduce zero keys.
        peak = scores.new_full((*score_shape[:-1], 1), -math.inf)
        if keys:
            peak = scores.detach().amax(-1, keepdim=True)
        if sink is not None:
            peak = torch.maximum(peak, sink.detach())
        shift = peak.masked_fill(peak == -math.inf, 0.0)
        weights = (scores - shift).exp()
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + (sink - shift).exp()
        hidden = total == 0  # nothing to attend to: otherwise the largest term is exactly 1
        if real_queries is not None:
            hidden = hidden | ~real_queries  # padding has no sink either
        total = total.masked_fill(hidden, 1.0)  # so that no gradient divides zero by zero
        lse = (shift + total.log()).masked_fill(hidden, -math.inf).squeeze(-1)

        if dropout_p > 0 or dropout_mask is not None:
            if dropout_mask is None:
                dropout_mask = torch.rand_like(weights) >= dropout_p
            weights = torch.where(_expand("dropout_mask", dropout_mask, score_shape), weights, 0.0)
        # Normalizing after the product is linear work, too. Where p is 1 nothing may be left.
        out = weights @ _per_query_head(value.to(dtype), heads) / total
        out = out * (1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0)
        out = _only(real_queries, out)  # zeros already: this keeps upstream NaN from flowing back

    out = _in_dimension_order(out, query.expand(*batch, heads, queries, head_dim))
    out = out.to(query.dtype if compute_dtype is None else compute_dtype)
    return out, lse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    bottom_right: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    compute_dtype: torch.dtype | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    r"""Gradients of `attention` from what its forward left; autograd serves a score_mod alone.

    With ``p``, ``s`` and ``drop`` as there, and ``w = exp(s - lse)``::

        d_value[j] = sum_i w[i, j] * drop[i, j] * d_out[i]
        d_score[i, j] = w[i, j] * (drop[i, j] * <d_out[i], v[j]> - <d_out[i], out[i]>)
        d_p[i, j] = d_score[i, j] * (1 - tanh(p[i, j] / softcap)^2)
        d_product[i, j] = d_p[i, j] * derivative of score_mod
        d_query[i] = scale * sum_j d_product[i, j] * k[j]
        d_key[j] = scale * sum_i d_product[i, j] * q[i]
        d_sink[h] = -sum_i exp(sink[h] - lse[i]) * <d_out[i], out[i]>

    as in Dao et al., "FlashAttention" (2022), appendix B.2; heads that share a key or value head
    add up. A sink is a key whose value is zero, and the sum of ``d_sink`` runs over the batch, too.

    Args:
        grad_output: ``(..., Hq, Sq, Dv)``.
        query, key, value, attn_mask, dropout_p, is_causal, scale, seq_lens_q, seq_lens_kv,
            bottom_right, window, softcap, alibi_slopes, sinks, score_mod, compute_dtype: as there.
        output, lse: what `attention` returned; of padding they are not read.
        dropout_mask: the weights that were kept; needed where dropout_p is above 0.

    Returns:
        The gradients of query, key and value in their shapes and ``d_score``, the gradient of a
        bias of the scores' shape ``(..., Hq, Sq, Skv)``; where sinks are given, a fifth, theirs
        ``(Hq,)``. All in the compute dtype.
    """
    dtype = compute_dtype or torch.promote_types(query.dtype, torch.float32)
    heads, queries, head_dim = query.shape[-3:]
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    scoring = _Scoring(
        torch.Size((*batch, heads, queries, key.size(-2))),
        query.device,
        attn_mask,
        is_causal,
        seq_lens_q,
        seq_lens_kv,
        bottom_right,
        window,
        softcap,
        alibi_slopes,
        score_mod,
    )
    real_queries, real_keys = scoring.real_queries(), scoring.real_keys()
    q, up, out = (_only(real_queries, t).to(dtype) for t in (query, grad_output, output))
    k, v = (_per_query_head(_only(real_keys, t).to(dtype), heads) for t in (key, value))
    modified = products = (q * scale) @ k.mT
    if score_mod is not None:
        with torch.enable_grad():
            products = products.detach().requires_grad_()
            traced = scoring.modified(products)
        modified = traced.detach()
    scores = scoring.biased(modified)
    lse = lse.to(dtype).unsqueeze(-1)
    empty = lse == -math.inf
    if real_queries is not None:
        empty = empty | ~real_queries
    lse = lse.masked_fill(empty, math.inf)
    weights = (scores - lse).exp()
    kept = weights
    back = up @ v.mT
    if dropout_mask is not None:
        drop = _expand("dropout_mask", dropout_mask, scores.shape).to(dtype)
        drop = drop * (1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0)
        kept, back = weights * drop, back * drop
    along = (up * out).sum(-1, keepdim=True)
    grad_scores = weights * (back - along)
    grad_products = grad_scores
    if softcap is not None:
        grad_products = grad_scores * (1.0 - (modified / softcap).tanh().square())
    if score_mod is not None:
        (grad_products,) = torch.autograd.grad(traced, products, grad_products)
    found = (
        scale * (grad_products @ k),
        _per_own_head(scale * (grad_products.mT @ q), key),
        _per_own_head(kept.mT @ up, value),
        grad_scores,
    )
    if sinks is None:
        return found
    grad_sinks = -(sinks.to(dtype).view(heads, 1, 1) - lse).exp() * along
    return *found, grad_sinks.sum((-2, -1)).sum_to_size(heads)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of ALiBi's biases for a number of heads.

    Press et al., "Train Short, Test Long" (2022), section 3: ``2^(-8 k / n)``, ``k = 1 ... n``, for
    ``n`` heads, a power of two. For other numbers their published code takes those of the power of
    two below, and then every second of those of the power of two above.

    Args:
        heads: number of query heads, at least 1.
        device: where the result lies.

    Returns:
        The slopes ``(heads,)`` in float32.

    Raises:
        ValueError: for less than one head.
    """
    if heads < 1:
        raise ValueError(f"`heads` must be at least 1, got {heads}; give the query's heads.")
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * k / below) for k in range(1, below + 1)]
    between = [2.0 ** (-4.0 * k / below) for k in range(1, 2 * below + 1, 2)]
    return torch.tensor((slopes + between)[:heads], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class _Scoring:
    """How products become scores, and which rows are real: the same forward and backward.

    Attributes:
        shape: of the scores, ``(..., Hq, Sq, Skv)``.
        device: of the scores.
        attn_mask, is_causal, seq_lens_q, seq_lens_kv, bottom_right, window, softcap,
            alibi_slopes, score_mod: as in `attention`.
    """

    shape: torch.Size
    device: torch.device
    attn_mask: Tensor | None
    is_causal: bool
    seq_lens_q: Tensor | None
    seq_lens_kv: Tensor | None
    bottom_right: bool
    window: tuple[int, int] | None
    softcap: float | None
    alibi_slopes: Tensor | None
    score_mod: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def scores(self, products: Tensor) -> Tensor:
        """The scaled products, modified, capped, biased, and -inf where the key is hidden."""
        return self.biased(self.modified(products))

    def modified(self, products: Tensor) -> Tensor:
        """The scaled products as the callback leaves them."""
        if self.score_mod is None:
            return products
        rows = torch.arange(self.shape[-2], dtype=products.dtype, device=self.device)
        columns = torch.arange(self.shape[-1], dtype=products.dtype, device=self.device)
        return self.score_mod(products, rows[:, None], columns)

    def biased(self, scores: Tensor) -> Tensor:
        """Modified products, capped, biased, and -inf where the key is hidden."""
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        bias = self.attn_mask
        if bias is not None and bias.dtype != torch.bool:
            scores = scores + _expand("attn_mask", bias.to(scores.dtype), self.shape)
        if self.alibi_slopes is not None:
            rows, columns = self._positions()
            slopes = self.alibi_slopes.to(scores.dtype).view(-1, 1, 1)
            scores = scores - slopes * (rows - columns).abs()
        # Last, so that nothing in the padding of a bias gets past it.
        for visible in self._visible():
            scores = torch.where(visible, scores, -math.inf)
        return scores

    def real_queries(self) -> Tensor | None:
        """``(..., 1, Sq, 1)``: False in padding; None where there is none."""
        return self._real("seq_lens_q", self.seq_lens_q, self.shape[-2])

    def real_keys(self) -> Tensor | None:
        """``(..., 1, Skv, 1)``: False in padding; None where there is none."""
        return self._real("seq_lens_kv", self.seq_lens_kv, self.shape[-1])

    def _visible(self) -> list[Tensor]:
        """Masks, True = attend; each broadcasts to the scores."""
        masks = []
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            masks.append(_expand("attn_mask", self.attn_mask, self.shape))
        queries, keys = self.real_queries(), self.real_keys()
        if queries is not None:
            masks.append(queries)
        if keys is not None:
            masks.append(keys.mT)
        left, right = self.window or (-1, -1)
        rows, columns = self._positions()
        if self.is_causal:
            masks.append(columns <= rows)
        if left >= 0:
            masks.append(columns >= rows - left)
        if right >= 0:
            masks.append(columns <= rows + right)
        return masks

    def _positions(self) -> tuple[Tensor, Tensor]:
        """``i + shift``, ``(Sq, 1)``, or ``(..., 1, Sq, 1)`` by lengths; and ``j``, ``(Skv,)``."""
        queries, keys = self.shape[-2:]
        rows = torch.arange(queries, device=self.device)[:, None]
        columns = torch.arange(keys, device=self.device)
        if not self.bottom_right:
            return rows, columns
        ends: list[int | Tensor] = [queries, keys]
        for place, lens in enumerate((self.seq_lens_q, self.seq_lens_kv)):
            if lens is not None:
                ends[place] = lens.long()[..., None, None, None]
        return rows + (ends[1] - ends[0]), columns

    def _real(self, name: str, lens: Tensor | None, length: int) -> Tensor | None:
        if lens is None:
            return None
        lens = _expand(name, lens, self.shape[:-3])[..., None, None, None]
        return torch.arange(length, device=self.device)[:, None] < lens


def _only(real: Tensor | None, tensor: Tensor) -> Tensor:
    """Zeros in place of padding, in the tensor and in its gradient, even where that is NaN."""
    return tensor if real is None else torch.where(real, tensor, 0.0)


def _per_own_head(tensor: Tensor, own: Tensor) -> Tensor:
    """Adds up the query heads that share a head of ``own``."""
    heads = own.size(-3)
    if tensor.size(-3) == heads:
        return tensor
    group = tensor.size(-3) // heads
    return tensor.reshape(*tensor.shape[:-3], heads, group, *tensor.shape[-2:]).sum(-3)


def _per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeats the heads of ``(..., H, S, D)`` so that every query head has its own."""
    if tensor.size(-3) == heads:
        return tensor
    return tensor.repeat_interleave(heads // tensor.size(-3), dim=-3)


def _in_dimension_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Makes a tensor dense in memory, its dimensions nested as those of ``like``."""
    # empty_like settles the dimensions whose own strides say nothing (broadcast, of size 1).
    strides = torch.empty_like(like, device="meta").stride()
    order = sorted(range(like.ndim), key=strides.__getitem__, reverse=True)
    back = sorted(range(like.ndim), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _expand(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """Broadcasts one way only: a mask must not enlarge the scores."""
    try:
        return mask.expand(shape)
    except RuntimeError as error:
        got = tuple(mask.shape)
        raise ValueError(
            f"`{name}` must be broadcastable to {tuple(shape)}, got {got}; reshape it."
        ) from error


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    dropout_mask: Tensor | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim < 3 or not tensor.is_floating_point():
            raise ValueError(
                f"`{name}` must be floating point of at least 3 dimensions, got {tensor.dtype} of "
                f"{tuple(tensor.shape)}; convert or unsqueeze it."
            )
        held, heads = tensor.size(-3), query.size(-3)
        if held != heads and (held == 0 or heads % held):
            raise ValueError(
                f"`{name}` must be of a number of heads that divides the query's {heads}, got "
                f"{held}; repeat or drop heads."
            )
    length, head_dim = key.shape[-2:]
    if (length, head_dim) != (value.size(-2), query.size(-1)):
        raise ValueError(
            f"`key` must be of the value's length {value.size(-2)} and the query's head dimension "
            f"{query.size(-1)}, got {length} and {head_dim}; make them agree."
        )
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        if not attn_mask.is_floating_point():
            raise ValueError(
                f"`attn_mask` must be boolean or floating point, got {attn_mask.dtype}; convert it."
            )
    if dropout_mask is not None and dropout_mask.dtype != torch.bool:
        raise ValueError(
            f"`dropout_mask` must be boolean, got {dropout_mask.dtype}; convert it, True = keep."
        )
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(
            f"`dropout_p` must be from 0 to 1, got {dropout_p}; give the probability of a drop."
        )


def _check_options(
    heads: int,
    seq_lens_q: Tensor | None,
    seq_lens_kv: Tensor | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    for name, lens in (("seq_lens_q", seq_lens_q), ("seq_lens_kv", seq_lens_kv)):
        if lens is not None and (
            lens.is_floating_point() or lens.is_complex() or lens.dtype == torch.bool
        ):
            raise ValueError(f"`{name}` must be integers, got {lens.dtype}; convert it.")
    for name, logits in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if logits is not None and (logits.shape != (heads,) or not logits.is_floating_point()):
            raise ValueError(
                f"`{name}` must be floating point of shape ({heads},), got {logits.dtype} of "
                f"{tuple(logits.shape)}; give one number per query head."
            )
    if window is not None and (len(window) != 2 or min(window) < -1):
        raise ValueError(
            f"`window` must be (left, right), each at least -1, got {window}; -1 leaves it open."
        )
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(
            f"`softcap` must be above 0 and finite, got {softcap}; None leaves scores uncapped."
        )
