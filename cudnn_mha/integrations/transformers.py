"""Hugging Face transformers: ``attn_implementation="cudnn_mha"``.

`register` makes the name known, with its attention function and its mask function: without the
latter transformers drops padding in silence.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudnn_mha import config
from cudnn_mha.errors import CudnnSdpaUnsupportedError
from cudnn_mha.functional import cudnn_sdpa
from cudnn_mha.functional_layouts import cudnn_sdpa_varlen
from cudnn_mha.inputs import autocast, is_half
from cudnn_mha.sequences import require_starts

try:
    _modeling: Any = importlib.import_module("transformers.modeling_utils")
    _masking: Any = importlib.import_module("transformers.masking_utils")
except ImportError as error:
    raise ImportError(
        "this needs Hugging Face transformers: pip install 'transformers>=5.17'"
    ) from error
if not {"q_length", "q_offset"} <= set(inspect.signature(_masking.sdpa_mask).parameters):
    raise ImportError(
        "this transformers makes masks in an older way: pip install 'transformers>=5.17'"
    )

from cudnn_mha.integrations.naming import in_words
from cudnn_mha.integrations.transformers_masks import (
    Pattern,
    PatternMask,
    Sequences,
    bounds_of,
    one_run_each,
    rows,
)

NAME = "cudnn_mha"
PADDING = ("any", "ends")

HARMLESS = frozenset(
    {
        "cache_position",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)
"""What models hand on to every layer and attention has no use for."""

_padding = "any"


def register(padding: str = "any") -> None:
    """Makes ``attn_implementation="cudnn_mha"`` known to transformers; again changes the option.

    Then ``from_pretrained(..., attn_implementation="cudnn_mha")`` and
    ``model.set_attn_implementation("cudnn_mha")`` compute all attention of a model that goes
    through transformers' attention interface by `cudnn_sdpa` and `cudnn_sdpa_varlen`: decoders,
    encoders, cross-attention, vision, in training, inference and generation, with grouped
    queries, sliding windows, soft caps (``softcap``), sinks (``s_aux``), position biases and
    packed sequences. With ``TORCH_CUDNN_MHA_ENABLED=1`` this happens by itself when transformers
    is imported.

    Causality and windows are never a mask of all scores; what else hides keys is treated thus:

    * A padding mask ``(B, S)`` with zeros anywhere. In training nothing is read back to the
      host. Causal layers without a window gather the real tokens of all sequences first, in
      their order, and compute on them alone; layers without a direction gather keys and values.
      Layers with a window or a soft cap, and those that look into a cache, take the mask as a
      bias of the keys ``(B, 1, 1, S)``.
    * ``padding="ends"`` promises that masks have their zeros at the ends of sequences alone, as
      every tokenizer pads, left or right. Then tokens stay where they are and kernels are told
      where each sequence starts and how long it is, also with a window. A mask that breaks the
      promise raises, on a GPU by an assertion on the device.
    * Where gradients are off, a mask is read on the host once a forward, as transformers does
      for PyTorch's attention: without padding there is no mask, and padding at the ends is
      treated as promised.
    * ``position_ids`` that start anew (packed sequences): their starts are read on the host, as
      transformers itself has just done. ``cu_seq_lens_q`` and the like are taken as they are.
    * Masks that are none of this (chunked attention, images that see themselves), masks
      ``(B, 1, Sq, Skv)`` of the caller's own, all masks while a compiler traces, and those for
      a static cache are masks of all scores.

    The output is that of ``attn_implementation="eager"`` but for rows of padding in causal
    attention: those are zeros, so a loss must leave them out, as losses do with labels of -100.
    ``output_attentions=True`` and every argument of a model's that means nothing here raise.

    Where cuDNN does not serve a call, PyTorch computes it with a mask of all scores; see
    `cudnn_sdpa`. `torch.compile` traces calls without a break.

    Models whose code computes attention itself have ``"eager"``. Most are refused in their first
    forward (Bloom, MPT, RemBERT). Those that look their layers up in a table of their own stop
    within transformers, with ``KeyError: 'cudnn_mha'`` when they are made: GPT-Neo, Bark, GIT,
    SuperGlue, the vision of SAM and Data2Vec, and Falcon where its release has such a table.

    Args:
        padding: ``"any"`` or ``"ends"``, see above; for all models, from their next forward on.

    Raises:
        ValueError: ``padding`` is none of these.
    """
    global _padding
    if padding not in PADDING:
        raise ValueError(f"padding must be one of {', '.join(PADDING)}, got {padding!r}")
    _padding = padding
    _modeling.AttentionInterface.register(NAME, attention)
    _masking.AttentionMaskInterface.register(NAME, mask)


# ------------------------------------------------------------------------------------------- mask


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = _masking.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward, as transformers' mask functions are called.

    Args:
        batch_size, q_length, kv_length: of the scores.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: of batch, head, query and key, whether the one sees the other.
        attention_mask: ``(B, S)`` bool, False for padding, by position.
        use_vmap: ``mask_function`` may be anybody's.
        device: of the mask.
        kwargs: what else transformers tells its own mask functions.

    Returns:
        A `PatternMask`, a mask of all scores, or None where transformers says that.
    """
    config = kwargs.get("config")
    if config is not None and _attends_itself(type(config).__module__):
        raise ValueError(
            f"the model of {type(config).__name__} computes its attention itself, not by "
            f"transformers' interface, and would take {NAME!r} masks for numbers; load it with "
            "attn_implementation='eager'"
        )
    known = isinstance(q_offset, int) and isinstance(kv_offset, int) and not use_vmap
    known = known and (attention_mask is None or attention_mask.dim() == 2)
    known = known and not _traced(attention_mask)
    bounds = bounds_of(mask_function) if known else None
    if bounds is None:
        if torch.is_grad_enabled() and attention_mask is not None:
            # To see whether the mask can be left out transformers would read it on the host.
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        dense: Tensor | None = _masking.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
        return dense
    assert isinstance(q_offset, int) and isinstance(kv_offset, int)
    kept, runs = None, False
    if attention_mask is not None:
        end = kv_offset + kv_length
        missing = max(end - attention_mask.shape[1], 0)
        kept = torch.nn.functional.pad(attention_mask, (0, missing))[:, kv_offset:end].bool()
        kept, runs = _looked_at(kept)
    return PatternMask(
        Pattern(
            batch_size,
            q_length,
            kv_length,
            torch.device(device),
            bounds.left,
            bounds.right,
            q_offset - kv_offset,
            kept,
            runs,
            bounds.segments,
        )
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _attends_itself(module_of_config: str) -> bool:
    """Whether the code of a configuration's models does not know transformers' interface."""
    return _without_interface(module_of_config)


@functools.cache
def _without_interface(module_of_config: str) -> bool:
    name = module_of_config.replace(".configuration_", ".modeling_")
    module = vars(sys.modules[name]) if name in sys.modules else {}
    models = [c for c in module.values() if isinstance(c, type) and c.__module__ == name]
    if "ALL_ATTENTION_FUNCTIONS" in module or not models:
        return False
    # Models made of others, whose code knows it, say that they can be given any.
    return not any(getattr(c, "_supports_attention_backend", False) for c in models)


def _traced(tensor: Tensor | None) -> bool:
    """Whether a compiler looks on, or a transform that has no plain tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or bool(_masking.is_tracing(tensor))
    )


def _looked_at(kept: Tensor) -> tuple[Tensor | None, bool]:
    """What is kept, None for all, and whether it is known to be one run in each row."""
    if not kept.numel():
        return kept, False
    capturing = kept.is_cuda and torch.cuda.is_current_stream_capturing()
    if not torch.is_grad_enabled() and not capturing:
        whole, runs = torch.stack([kept.all(), one_run_each(kept)]).tolist()
        return (None if whole else kept), runs
    if _padding == "ends":
        torch._assert_async(
            one_run_each(kept),
            "an attention mask has zeros between ones, but padding='ends' was promised; call "
            "cudnn_mha.integrations.transformers.register(padding='any')",
        )
        return kept, True
    return kept, False


# -------------------------------------------------------------------------------------- attention


@dataclass
class _Call:
    """Query, key, value ``(B, H, S, D)`` and what holds however the call is computed."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    softcap: float | None
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        """PyTorch's own function can compute it, given a mask."""
        return self.softcap is None and self.sinks is None

    def padded(self, **kwargs: Any) -> Tensor:
        """By `cudnn_sdpa`, ``(B, Sq, H, Dv)``."""
        output: Any = cudnn_sdpa(
            self.query,
            self.key,
            self.value,
            enable_gqa=self.query.shape[1] != self.key.shape[1],
            softcap=self.softcap,
            sinks=self.sinks,
            **self.options,
            **kwargs,
        )
        by_token: Tensor = output.transpose(1, 2)
        return by_token

    def packed(self, queries: Sequences, keys: Sequences, **kwargs: Any) -> Tensor:
        """By `cudnn_sdpa_varlen`, ``(B, Sq, H, Dv)``."""
        batch, _, seq_q, _ = self.query.shape
        output: Any = cudnn_sdpa_varlen(
            _tokens(self.query, queries),
            _tokens(self.key, keys),
            _tokens(self.value, keys),
            queries.starts,
            keys.starts,
            queries.longest,
            keys.longest,
            seq_lens_q=queries.lengths,
            seq_lens_kv=keys.lengths,
            softcap=self.softcap,
            sinks=self.sinks,
            **self.options,
            **kwargs,
        )
        if queries.places is not None and queries.order is not None:
            output = _Permuted.apply(output, queries.places, queries.order)
        by_row: Tensor = output.unflatten(0, (batch, seq_q))
        return by_row


class _Permuted(torch.autograd.Function):
    """Rows in another order; the gradient takes the way back, where indexing would add atomically.

    Its arguments are the rows, the permutation and its inverse.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Permuted.apply(gradient, inverse, order), None, None


def _tokens(tensor: Tensor, where: Sequences) -> Tensor:
    """``(B, H, S, D)`` as ``(tokens, H, D)``, in the order of the sequences."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    if where.order is None:
        return flat
    moved: Tensor = _Permuted.apply(flat, where.order, where.places)
    return moved


@in_words(
    {
        "scale": "scaling",
        "dropout_p": "dropout",
        "attn_mask": "attention_mask",
        "sinks": "s_aux",
        "window": "sliding_window",
        "cu_seqlens_q": "cu_seq_lens_q",
        "cu_seqlens_kv": "cu_seq_lens_k",
        "max_seqlen_q": "max_length_q",
        "max_seqlen_kv": "max_length_k",
    }
)
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers' attention functions are called.

    Args:
        module: the layer; its ``is_causal`` counts where the argument is None.
        query: ``(B, Hq, Sq, D)``.
        key, value: ``(B, Hkv, Skv, D)``, heads not repeated.
        attention_mask: of `mask`, or ``(B, 1, Sq, Skv)``, boolean or additive; then causality
            and window are the mask's affair. With None they follow from the other arguments.
        dropout, scaling, softcap: as for `cudnn_sdpa`.
        is_causal: query i sees keys up to i, unless there is one query alone.
        sliding_window: keys that a query sees, itself included.
        s_aux: ``(Hq,)`` the sinks of gpt-oss.
        position_bias: ``(1 or B, Hq, Sq, Skv)``, added to the scores; may require a gradient.
        cu_seq_lens_q, cu_seq_lens_k: ``(N + 1,)`` where packed sequences start.
        max_length_q, max_length_k: at least the longest of them; else the length of all is taken.
        deterministic: True asks for gradients that are bit-equal on every run.
        kwargs: what models hand on besides; see `HARMLESS`.

    Returns:
        ``(B, Sq, Hq, Dv)``, and None in place of the attention weights.

    Raises:
        ValueError: an argument that would have to be ignored.
    """
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in HARMLESS:
            raise ValueError(_refusal(name))
    query, key, value = autocast(query), autocast(key), autocast(value)
    options = {
        "dropout_p": dropout,
        "scale": scaling,
        "deterministic": True if deterministic else None,
    }
    call = _Call(query, key, value, options, softcap, s_aux)
    seq_q, seq_kv = query.shape[2], key.shape[2]
    pattern: Pattern | None = None
    if isinstance(attention_mask, PatternMask):
        if attention_mask.shape[2:] == (seq_q, seq_kv) and not torch.compiler.is_compiling():
            pattern = attention_mask.pattern
        else:
            attention_mask = attention_mask.pattern.dense
    elif attention_mask is None:
        pattern = _without_mask(module, call, is_causal, sliding_window)
    elif attention_mask.dim() != 4:
        raise ValueError(
            "attention_mask must have 4 dimensions, (B, 1, Sq, Skv), got shape "
            f"{tuple(attention_mask.shape)}"
        )
    packed = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if any(given is not None for given in packed):
        if position_bias is not None:
            raise ValueError("position_bias is not served beside cu_seq_lens_q")
        if pattern is None or pattern.kept is not None:
            raise ValueError("attention_mask must be None beside cu_seq_lens_q, which replaces it")
        output = _by_starts(call, pattern, *packed)
    elif position_bias is not None:
        output = _biased(call, attention_mask, pattern, position_bias)
    elif pattern is None:
        output = call.padded(attn_mask=attention_mask)
    else:
        output = _patterned(call, pattern)
    return output.contiguous(), None


def _refusal(name: str) -> str:
    if name == "output_attentions":
        return (
            "output_attentions must be False: attention weights are never computed; "
            "attn_implementation='eager' has them"
        )
    return (
        f"{name} is no argument that attn_implementation='cudnn_mha' knows, and ignoring it could "
        "change what the model computes; take another attn_implementation for this model"
    )


def _without_mask(
    module: torch.nn.Module, call: _Call, is_causal: bool | None, sliding_window: int | None
) -> Pattern:
    """What a query sees where a model has no mask: PyTorch's conventions, and the window."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    batch, _, seq_q, _ = call.query.shape
    device = call.query.device
    causal = seq_q > 1 and bool(is_causal)
    if causal and call.key.shape[2] > seq_q:
        # An empty static cache, whose keys are those of the queries and then nothing.
        call.key, call.value = call.key[:, :, :seq_q], call.value[:, :, :seq_q]
    seq_kv = call.key.shape[2]
    left = None
    if sliding_window is not None and sliding_window < seq_kv:
        if not is_causal:
            raise ValueError(
                "sliding_window must come with an attention_mask in attention that is not causal, "
                f"got {sliding_window} for {seq_kv} keys"
            )
        left = sliding_window - 1
    shift = 0 if causal else seq_kv - seq_q
    return Pattern(batch, seq_q, seq_kv, device, left, 0 if causal else None, shift)


def _for_cudnn(query: Tensor) -> bool:
    """Whether it is worth asking for what PyTorch's function cannot say."""
    return (
        not torch.compiler.is_compiling()
        and query.is_cuda
        and is_half(query.dtype)
        and torch._C._get_cudnn_sdp_enabled()
        and not config.settings().disabled
    )


def _if_served(query: Tensor, way: Callable[[], Tensor | None]) -> Tensor | None:
    """What a way without fallback gives; None where cuDNN does not serve it, or it is none.

    What is tried last has a fallback, and says why where that is not served either.
    """
    if not _for_cudnn(query):
        return None
    try:
        return way()
    except CudnnSdpaUnsupportedError:
        return None


def _patterned(call: _Call, pattern: Pattern) -> Tensor:
    """The call by whatever says the pattern best and is served."""
    if pattern.kept is None and pattern.segments is None:
        terms = _terms(pattern)
        if terms is not None and terms.keys() <= {"is_causal"}:  # a fallback needs no mask either
            return call.padded(**terms)
    for way in (_by_sequences, _by_terms):
        output = _if_served(call.query, functools.partial(way, call, pattern))
        if output is not None:
            return output
    return call.padded(attn_mask=pattern.dense)


def _terms(pattern: Pattern, *, beside_mask: bool = False) -> dict[str, Any] | None:
    """The bounds of a pattern as arguments of `cudnn_sdpa`; None where it has none for them."""
    if not pattern.bounded:
        return {}
    if pattern.right == 0 and pattern.left is None and not pattern.shift and not beside_mask:
        return {"is_causal": True}
    window = tuple(-1 if bound is None else bound for bound in (pattern.left, pattern.right))
    if pattern.shift == 0:
        return {"window": window}
    if pattern.shift == pattern.seq_kv - pattern.seq_q:
        return {"window": window, "causal_alignment": "bottom_right"}
    return None


def _by_sequences(call: _Call, pattern: Pattern) -> Tensor | None:
    """On real tokens alone; None where that is not the same thing, or is never served."""
    if call.softcap is not None or (pattern.kept is not None and pattern.seq_q == 1):
        return None
    if pattern.segments is None:
        if pattern.kept is None:
            return None
        if not pattern.bounded:
            # Queries may be other tokens than keys, and real where those are padding.
            keys = pattern.sequences
            queries = rows(pattern.batch, pattern.seq_q, pattern.device)
            assert keys is not None
            return call.packed(queries, keys, fallback=False)
        moved = pattern.left is not None and not pattern.runs  # distances would not stay
        if moved or not pattern.one_sided:
            return None
    terms = _terms(pattern)
    sequences = pattern.sequences
    if terms is None or sequences is None:
        return None
    return call.packed(sequences, sequences, fallback=False, **terms)


def _by_terms(call: _Call, pattern: Pattern) -> Tensor | None:
    """With bounds as they are, and padding as a bias of the keys."""
    terms = _terms(pattern, beside_mask=pattern.kept is not None)
    if terms is None or pattern.segments is not None:
        return None
    if pattern.kept is not None:
        terms["attn_mask"] = pattern.kept[:, None, None]
    return call.padded(fallback=False, **terms)


def _by_starts(
    call: _Call,
    pattern: Pattern,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int | Tensor | None,
    longest_k: int | Tensor | None,
) -> Tensor:
    """The call on sequences that the caller has packed, each with the bounds of the pattern."""
    if starts_q is None or starts_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must both be given, or none of them")
    tokens = call.query.shape[0] * call.query.shape[2], call.key.shape[0] * call.key.shape[2]
    sides = []
    for name, starts, longest, most in (
        ("q", starts_q, longest_q, tokens[0]),
        ("k", starts_k, longest_k, tokens[1]),
    ):
        if starts.dim() == 2 and starts.shape[0] == 1:
            starts = starts[0]
        if starts.dim() != 1:
            raise ValueError(
                f"cu_seq_lens_{name} must be of shape (N + 1,), got {tuple(starts.shape)}"
            )
        require_starts(f"cu_seq_lens_{name}", starts, most)
        if longest is None or (isinstance(longest, Tensor) and longest.device.type != "cpu"):
            longest = most  # rather than read it on the host
        sides.append(Sequences(starts, None, int(longest)))
    queries, keys = sides
    if pattern.shift:
        raise ValueError("cu_seq_lens_q is not served with a cache")
    terms = _terms(pattern) or {}
    output = _if_served(call.query, lambda: call.packed(queries, keys, fallback=False, **terms))
    if output is not None:
        return output
    # The same on one long row: a mask says which tokens are of one sequence.
    rows_q, rows_k = (
        torch.searchsorted(side.starts, torch.arange(count, device=call.query.device), right=True)
        for side, count in zip(sides, tokens, strict=True)
    )
    seen = rows_q[:, None] == rows_k
    if pattern.bounded:
        place_q = torch.arange(tokens[0], device=seen.device) - queries.starts[rows_q - 1]
        place_k = torch.arange(tokens[1], device=seen.device) - keys.starts[rows_k - 1]
        seen = seen & pattern.within(place_q[:, None] - place_k)
    batch, _, seq_q, _ = call.query.shape
    query, key, value = (
        t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
        for t in (call.query, call.key, call.value)
    )
    long = _Call(query, key, value, call.options, call.softcap, call.sinks)
    shape = (batch, seq_q, query.shape[1], value.shape[3])
    return long.padded(attn_mask=seen[None, None]).reshape(shape)


def _biased(
    call: _Call, attention_mask: Tensor | None, pattern: Pattern | None, bias: Tensor
) -> Tensor:
    """The call with a bias of all scores."""
    if pattern is None:
        assert attention_mask is not None
        if attention_mask.dtype != torch.bool:
            return call.padded(attn_mask=bias + attention_mask)
        seen = attention_mask
    else:
        bias = bias[..., : pattern.seq_kv]
        bare = pattern.kept is None and pattern.segments is None
        if bare and not pattern.bounded:
            return call.padded(attn_mask=bias)
        terms = _terms(pattern, beside_mask=True) if bare else None
        if terms:
            output = _if_served(
                call.query, lambda: call.padded(attn_mask=bias, fallback=False, **terms)
            )
            if output is not None:
                return output
        seen = pattern.dense
    return call.padded(attn_mask=torch.where(seen, bias, -torch.inf))
