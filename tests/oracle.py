"""Compares `cudnn_sdpa` with the definition in float64, by what PyTorch itself gets wrong.

The rule: the error of every result, ``‖got - exact‖``, is at most 1.5 times that of PyTorch's math
backend in the same dtype, plus a floor. That backend computes in float32 inside, which no fused
kernel does: these round the weights P, the score gradients dS and the output O to the dtype of
the call before they enter the next matrix product. The floor is what half a unit in the last
place (``eps / 2``) on each of these does to a result, taken as random in the sums (`floors`).
What PyTorch's function cannot say has no such backend: there half as much again as the floor is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudnn_mha import cudnn_sdpa, reference


@dataclass
class Call:
    """One attention call: tensors, the arguments of `cudnn_sdpa`, the output's gradient.

    Padding beyond ``seq_lens_q`` and ``seq_lens_kv`` may hold NaN.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    grad_output: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    exact_mask: Tensor | None = None
    sinks: Tensor | None = None

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Fresh tensors in the same layout that collect gradients; mask and sinks where they do."""
        given = [self.query, self.key, self.value]
        if self.mask is not None and self.mask.requires_grad:
            given.append(self.mask)
        if self.sinks is not None:
            given.append(self.sinks)
        return [
            (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_() for t in given
        ]

    def _mask(self, leaves: list[Tensor]) -> Tensor | None:
        own = self.mask is not None and self.mask.requires_grad
        return leaves[3] if own else self.mask

    def _sinks(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        return {} if self.sinks is None else {"sinks": leaves[-1]}

    @property
    def names(self) -> list[str]:
        """Names of the leaves' gradients."""
        own = [True, True, True, self.mask is not None and self.mask.requires_grad]
        own.append(self.sinks is not None)
        return [name for name, wanted in zip(NAMES, own, strict=True) if wanted]

    @property
    def extended(self) -> bool:
        """Whether PyTorch's function cannot say it."""
        known = {"is_causal", "scale", "enable_gqa", "deterministic", "dropout_p"}
        return self.sinks is not None or not known.issuperset(self.options)

    def definition(self) -> dict[str, Any]:
        """The options as the reference has them."""
        o = dict(self.options)
        kept = ("is_causal", "scale", "seq_lens_q", "seq_lens_kv", "window", "softcap")
        found = {k: o[k] for k in (*kept, "alibi_slopes", "score_mod") if k in o}
        if o.get("causal_alignment") == "bottom_right":
            found["bottom_right"] = True
        if o.get("alibi"):
            slopes = reference.alibi_slopes(self.query.shape[-3], self.query.device)
            found["alibi_slopes"] = slopes
        return found


Results = dict[str, Tensor]
NAMES = ("grad_query", "grad_key", "grad_value", "grad_mask", "grad_sinks")


def ours(call: Call, *, gradients: bool = True, **options: Any) -> Results:
    """Output, LSE and gradients by cuDNN; anything but cuDNN raises."""
    leaves = call.leaves()
    with torch.set_grad_enabled(gradients):
        output, lse = cudnn_sdpa(
            *leaves[:3],
            call._mask(leaves),
            return_lse=True,
            **{"fallback": False, **call.options, **call._sinks(leaves), **options},
        )
    results = {"output": output.detach(), "lse": lse.detach()}
    if gradients:
        found = torch.autograd.grad(output, leaves, call.grad_output)
        results |= dict(zip(call.names, found, strict=True))
    return results


def exact(call: Call, *, gradients: bool = True) -> Results:
    """The same from the definition, in float64."""
    leaves = call.leaves(torch.float64)
    o = call.definition() | call._sinks(leaves)
    mask = call._mask(leaves) if call.exact_mask is None else call.exact_mask
    output, lse = reference.attention(*leaves[:3], mask, compute_dtype=torch.float64, **o)
    results = {"output": output.detach(), "lse": lse.detach()}
    if gradients:
        assert call.grad_output is not None
        found = torch.autograd.grad(output, leaves, call.grad_output.double())
        results |= dict(zip(call.names, found, strict=True))
    return results


def math(call: Call, *, gradients: bool = True) -> Results:
    """The same by PyTorch's math backend in the dtype of the call; it has no LSE."""
    leaves = call.leaves()
    o = {k: v for k, v in call.options.items() if k in ("is_causal", "scale")}
    mask = call._mask(leaves)
    if mask is not None and mask.dtype not in (torch.bool, torch.float32):
        mask = mask.to(call.query.dtype)
    key, value = (_repeat(t, call.query) for t in leaves[1:3])
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(leaves[0], key, value, mask, **o)
    results = {"output": output.detach()}
    if gradients:
        found = torch.autograd.grad(output, leaves, call.grad_output)
        results |= dict(zip(NAMES, found, strict=False))
    return results


def _repeat(tensor: Tensor, query: Tensor) -> Tensor:
    if tensor.shape[-3] == query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)


def _slope(products: Tensor, options: dict[str, Any]) -> Tensor:
    """By how much the scores change with the scaled products, before masks."""
    rows, columns = (torch.arange(n, device=products.device).double() for n in products.shape[-2:])
    scores = leaf = products.clone().requires_grad_()
    if options.get("score_mod"):
        scores = options["score_mod"](scores, rows[:, None], columns)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    (slope,) = torch.autograd.grad(scores.sum(), leaf)
    return slope


def floors(call: Call, *, gradients: bool = True) -> Results:
    """Norm of the error that rounding P, dS and O to the dtype of the call explains."""
    query, key, value = (
        t.detach().double().nan_to_num() for t in (call.query, call.key, call.value)
    )
    scale = abs(call.options.get("scale") or query.shape[-1] ** -0.5)
    half_ulp = torch.finfo(call.query.dtype).eps / 2
    o = call.definition()
    if call.sinks is not None:
        o["sinks"] = call.sinks.detach().double()
    mask = call.mask if call.exact_mask is None else call.exact_mask
    mask = None if mask is None else mask.detach()
    output, lse = reference.attention(query, key, value, mask, compute_dtype=torch.float64, **o)
    # Attention to one-hot values shows the weights.
    keys = torch.eye(key.shape[-2], dtype=torch.float64, device=key.device)
    one_hot = keys.expand(*value.shape[:-1], key.shape[-2])
    weights, _ = reference.attention(query, key, one_hot, mask, compute_dtype=torch.float64, **o)
    kept = weights
    per_key, per_value = (_repeat(t, query) for t in (key, value))

    def norm(squares: Tensor) -> Tensor:
        return half_ulp * squares.sum().sqrt()

    found = {"output": norm(weights.square() @ per_value.square() + output.square())}
    if not gradients:
        return found
    assert call.grad_output is not None
    upstream = call.grad_output.double().nan_to_num()
    inner = upstream @ per_value.mT
    score = weights * (inner - (upstream * output).sum(-1, keepdim=True))
    if call.options.get("softcap") or call.options.get("score_mod"):
        slope = _slope(scale * query @ per_key.mT, call.options)
        score, weights = score * slope, weights * slope
    # A rounded output shifts the score gradients of its whole row the same way.
    error_of_output = output.square() + weights.square() @ per_value.square()
    shift = (upstream.square() * error_of_output).sum(-1, keepdim=True).sqrt()
    rounded = score.square()
    found["grad_query"] = norm(
        scale**2 * (rounded @ per_key.square() + (shift * (weights @ per_key)).square())
    )
    found["grad_key"] = norm(
        scale**2 * (rounded.mT @ query.square() + (weights * shift).square().mT @ query.square())
    )
    found["grad_value"] = norm(kept.square().mT @ upstream.square())
    if call.sinks is not None:
        hidden = lse == -torch.inf
        of_sinks = (call.sinks.double()[:, None] - lse).exp().masked_fill(hidden, 0)[..., None]
        found["grad_sinks"] = norm((of_sinks * shift).square())
    if call.mask is not None and call.mask.requires_grad:
        keywise = call.mask.shape[-1] == 1 < key.shape[-2]
        row = (shift * (weights.sum(-1, keepdim=True) if keywise else weights)).square()
        # The gradient of every score is written in the dtype of the call before it is summed.
        found["grad_mask"] = 2 * (norm(rounded) + norm(row))
    return found


def failures(
    call: Call, *, gradients: bool = True, results: Callable[..., Results] = ours, **options: Any
) -> list[str]:
    """What of a call breaks the rule, in words; empty where all is right.

    ``results(call, gradients=..., **options)`` computes it, by default through `cudnn_sdpa`.
    """
    if call.grad_output is None and gradients:
        shape = (*call.query.shape[:-1], call.value.shape[-1])
        call.grad_output = torch.randn(shape, device=call.query.device).to(call.query.dtype)
    got = results(call, gradients=gradients, **options)
    right = exact(call, gradients=gradients)
    peer = {} if call.extended else math(call, gradients=gradients)
    floor = floors(call, gradients=gradients)
    found = []
    for name, value in got.items():
        want = right[name]
        if value.shape != want.shape:
            found.append(f"{name}: shape {tuple(value.shape)}, expected {tuple(want.shape)}")
            continue
        if name == "lse":
            found += _lse_failures(value, want)
            continue
        error = (value.double() - want).norm().item()
        allowed = 0.0
        if peer:
            allowed = 1.5 * (peer[name].double() - want).nan_to_num(0).norm().item()
        allowed += floor[name].item() * (1.0 if peer else 1.5) + 1e-6 * want.numel() ** 0.5
        if not error <= allowed:  # NaN fails too
            size = want.norm().item()
            found.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}, norm {size:.3g}")
    return found


def _lse_failures(got: Tensor, want: Tensor) -> list[str]:
    """The LSE is float32 and natural: as exact as float32 products of rounded inputs are."""
    empty = want == -torch.inf
    if not torch.equal(got == -torch.inf, empty):
        return ["lse: -inf in other rows than those that attend to nothing"]
    error = (got.double() - want).masked_fill(empty, 0).abs()
    allowed = 2e-3 + 2e-5 * want.masked_fill(empty, 0).abs()
    if not bool((error <= allowed).all()):
        return [f"lse: error {error.max().item():.3g}"]
    return []


def assert_right(
    call: Call, *, gradients: bool = True, results: Callable[..., Results] = ours, **options: Any
) -> None:
    """Fails with everything that breaks the rule."""
    found = failures(call, gradients=gradients, results=results, **options)
    assert not found, "; ".join(found)
