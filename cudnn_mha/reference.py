"""Scaled dot-product attention from its definition, in plain PyTorch, on any device.

The oracle that the tests compare with, and the last fallback. It shares no code with the rest of
the package, so that it cannot share a mistake with it.
"""

from __future__ import annotations

import contextlib
import math

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
    compute_dtype: torch.dtype | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attention of every query row over all keys, and the log-sum-exp of its scores.

    For query row ``i`` of query head ``h``, with ``k`` and ``v`` the key and value heads it uses::

        s[j] = scale * <q[i], k[j]> + bias[i, j]      -inf where the mask hides key j
        lse  = log(sum_j exp(s[j]))                   natural logarithm
        out  = sum_j exp(s[j] - lse) * drop[i, j] * v[j]

    This is eq. 1 of Vaswani et al., "Attention Is All You Need" (2017), with the masks of its
    section 3.2.3; grouped heads as in Ainslie et al., "GQA" (2023): head ``h`` reads key head
    ``h // (Hq // Hk)`` and value head ``h // (Hq // Hv)``. ``drop`` is 0 or ``1 / (1 - dropout_p)``
    (Srivastava et al., "Dropout", 2014, scaled while training). A row that may attend to no key
    gives zeros, an LSE of -inf, and zero gradients. Autograd differentiates both results.

    Args:
        query: ``(..., Hq, Sq, Dqk)``. The leading batch dimensions of all inputs broadcast.
        key: ``(..., Hk, Skv, Dqk)``; ``Hk`` divides ``Hq``.
        value: ``(..., Hv, Skv, Dv)``; ``Hv`` divides ``Hq`` and may differ from ``Hk``.
        attn_mask: broadcastable to ``(..., Hq, Sq, Skv)``. Boolean: True = attend. Floating
            point: the bias, added in the compute dtype; -inf there hides the key.
        dropout_p: probability of dropping a weight, from 0 to 1. The LSE never includes dropout.
        is_causal: row ``i`` attends to keys ``j <= i`` (top-left, also where ``Sq != Skv``).
        scale: factor on the products; ``1 / sqrt(Dqk)`` by default.
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
    _check(query, key, value, attn_mask, dropout_p, is_causal, dropout_mask)
    dtype = compute_dtype or torch.promote_types(query.dtype, torch.float32)
    heads, queries, head_dim = query.shape[-3:]
    keys = key.size(-2)
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    score_shape = torch.Size((*batch, heads, queries, keys))
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0

    # Autocast would silently compute the products in half precision. It does not know "meta".
    exact: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if query.device.type != "meta":
        exact = torch.autocast(query.device.type, enabled=False)
    with exact:
        # Scaling the query, not the scores: linear work, and no overflow that the scale prevents.
        q = (query.to(dtype) * scale).expand(*batch, heads, queries, head_dim)
        scores = q @ _per_query_head(key.to(dtype), heads).mT
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = torch.where(_expand("attn_mask", attn_mask, score_shape), scores, -math.inf)
        elif attn_mask is not None:
            scores = scores + _expand("attn_mask", attn_mask.to(dtype), score_shape)
        if is_causal:
            past = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
            scores = torch.where(past, scores, -math.inf)

        # Neither result depends on the shift, so it needs no gradient. Rows without a key shift
        # by zero: -inf minus -inf would be NaN. amax refuses to reduce zero keys.
        shift = scores.new_zeros(*score_shape[:-1], 1)
        if keys:
            peak = scores.detach().amax(-1, keepdim=True)
            shift = peak.masked_fill(peak == -math.inf, 0.0)
        weights = (scores - shift).exp()
        total = weights.sum(-1, keepdim=True)
        hidden = total == 0  # no key to attend to: otherwise the largest weight is exactly 1
        total = total.masked_fill(hidden, 1.0)  # so that no gradient divides zero by zero
        lse = (shift + total.log()).masked_fill(hidden, -math.inf).squeeze(-1)

        if dropout_p > 0 or dropout_mask is not None:
            if dropout_mask is None:
                dropout_mask = torch.rand_like(weights) >= dropout_p
            weights = torch.where(_expand("dropout_mask", dropout_mask, score_shape), weights, 0.0)
        # Normalizing after the product is linear work, too. Where p is 1 nothing may be left.
        out = weights @ _per_query_head(value.to(dtype), heads) / total
        out = out * (1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0)

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
    compute_dtype: torch.dtype | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Gradients of `attention` from what its forward left, without autograd.

    With ``w = exp(s - lse)`` and ``drop`` as there::

        d_value[j] = sum_i w[i, j] * drop[i, j] * d_out[i]
        d_score[i, j] = w[i, j] * (drop[i, j] * <d_out[i], v[j]> - <d_out[i], out[i]>)
        d_query[i] = scale * sum_j d_score[i, j] * k[j]
        d_key[j] = scale * sum_i d_score[i, j] * q[i]

    as in Dao et al., "FlashAttention" (2022), appendix B.2; heads that share a key or value head
    add up.

    Args:
        grad_output: ``(..., Hq, Sq, Dv)``.
        query, key, value, attn_mask, dropout_p, is_causal, scale, compute_dtype: as there.
        output, lse: what `attention` returned.
        dropout_mask: the weights that were kept; needed where dropout_p is above 0.

    Returns:
        The gradients of query, key and value in their shapes and that of the scores,
        ``(..., Hq, Sq, Skv)``, all in the compute dtype.
    """
    dtype = compute_dtype or torch.promote_types(query.dtype, torch.float32)
    heads, queries, head_dim = query.shape[-3:]
    keys = key.size(-2)
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    q, up, out = (t.to(dtype) for t in (query, grad_output, output))
    k, v = (_per_query_head(t.to(dtype), heads) for t in (key, value))
    scores = (q * scale) @ k.mT
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(_expand("attn_mask", attn_mask, scores.shape), scores, -math.inf)
    elif attn_mask is not None:
        scores = scores + _expand("attn_mask", attn_mask.to(dtype), scores.shape)
    if is_causal:
        past = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        scores = torch.where(past, scores, -math.inf)
    empty = lse == -math.inf
    weights = (scores - lse.to(dtype).masked_fill(empty, math.inf).unsqueeze(-1)).exp()
    kept = weights
    back = up @ v.mT
    if dropout_mask is not None:
        drop = _expand("dropout_mask", dropout_mask, scores.shape).to(dtype)
        drop = drop * (1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0)
        kept, back = weights * drop, back * drop
    grad_scores = weights * (back - (up * out).sum(-1, keepdim=True))
    return (
        scale * (grad_scores @ k),
        _per_own_head(scale * (grad_scores.mT @ q), key),
        _per_own_head(kept.mT @ up, value),
        grad_scores,
    )


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
    is_causal: bool,
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
    if attn_mask is not None and is_causal:
        raise ValueError(
            "`attn_mask` must be None where `is_causal` is True, got both; mask the future in it."
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
