"""Which feature is served on which GPU, as cuDNN answers: ``python -m cudnn_mha.features``.

cuDNN is asked for proposals, nothing is compiled. The table in the README is this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cudnn_mha import config, devices, packed, padded, paged, runtime
from cudnn_mha.checks import check, remedied
from cudnn_mha.devices import Device
from cudnn_mha.graph_builder import propose_plans
from cudnn_mha.inputs import Options
from cudnn_mha.precompile import specs_of
from cudnn_mha.routes import Given
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.terms import Terms

GPUS = ("a100-sxm-80gb", "l40s", "h200", "b200", "rtx-5090")
"""One of each generation."""

Specs = Callable[[Device], list[AttentionSpec]]
"""The graphs of a call on a GPU, the forward first."""


def table() -> str:
    """The features in Markdown, a column for each GPU.

    Raises:
        CudnnUnavailableError: there is no cuDNN here.
    """
    gpus = [devices.described(name) for name in GPUS]
    heads = [f"`{name}` (sm_{gpu.sm})" for name, gpu in zip(GPUS, gpus, strict=True)]
    rows = [("feature", *heads), ("---", *("---" for _ in gpus))]
    rows += [(name, *(_cell(specs(gpu), gpu) for gpu in gpus)) for name, specs in _features()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    version = config.version_text(runtime.cudnn_version())
    intro = (
        f"With cuDNN {version}, bfloat16 and head dimension 128; forward alone where it says so:"
    )
    return "\n".join([intro, "", *lines])


def _cell(specs: list[AttentionSpec], device: Device) -> str:
    served = [_served(spec, device) for spec in specs]
    if not served[0]:
        return "no"
    if len(served) == 1 or not served[1]:
        return "forward"
    return "yes"


def _served(spec: AttentionSpec, device: Device) -> bool:
    """Whether nothing that we know speaks against a graph, and cuDNN proposes a plan for it."""
    spec = remedied(spec, device)
    if check(spec, device, runtime.cudnn_version()):
        return False
    try:
        graph = propose_plans(spec, device)
    except runtime.library().cudnnGraphNotSupportedError:
        return False
    return any(plan.cpp_index is not None for plan in graph.plans)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_QUERY = _meta(2, 8, 512, 128)
_GROUPS = _meta(2, 2, 512, 128)
_LENGTHS = _meta(2, dtype=torch.int32)
_BY_HEAD = _meta(8, dtype=torch.float32)


def _features() -> Iterator[tuple[str, Specs]]:
    mask = _meta(2, 8, 512, 512)
    learnt = mask.clone().requires_grad_()
    causal = Terms(right=0)
    yield "dense", _plain(Options())
    yield "causal", _plain(Options(is_causal=True))
    yield "grouped queries", _plain(Options(enable_gqa=True), kv=_GROUPS)
    yield "head dimension 256", _plain(Options(), _meta(2, 8, 512, 256))
    yield "mask", _plain(Options(), mask=mask)
    yield "mask with a gradient", _plain(Options(), mask=learnt)
    yield "dropout", _plain(Options(dropout_p=0.25))
    yield "deterministic gradients", _plain(Options(deterministic=True))
    yield "sequence lengths", _more(Terms(), lengths_q=_LENGTHS, lengths_kv=_LENGTHS)
    yield "window", _more(Terms(left=128, right=0))
    yield (
        "bottom right diagonal",
        _more(Terms(right=0, bottom_right=True), kv=_meta(2, 8, 640, 128)),
    )
    yield "ALiBi, causal", _more(Terms(right=0, alibi=True))
    yield "ALiBi, given slopes", _more(Terms(alibi=True), slopes=_BY_HEAD)
    yield "soft cap", _more(Terms(softcap=20.0))
    yield "sinks", _more(causal, sinks=_BY_HEAD.clone().requires_grad_())
    yield "packed sequences", _packed
    yield "pages, one query", _paged(1)
    yield "pages, several queries", _paged(8)


def _plain(
    options: Options, query: Tensor = _QUERY, kv: Tensor | None = None, mask: Tensor | None = None
) -> Specs:
    keys = query if kv is None else kv
    return lambda device: specs_of(query, keys, keys, mask, options, device, gradient=True)


def _more(terms: Terms, kv: Tensor = _QUERY, **operands: Tensor) -> Specs:
    given = Given(_QUERY, kv, kv, **operands)
    return lambda device: [*padded.describe(given, Options(), terms, True, device).graphs]


def _packed(device: Device) -> list[AttentionSpec]:
    tokens, starts = _meta(1024, 8, 128), _meta(3, dtype=torch.int32)
    given = Given(tokens, tokens, tokens, starts_q=starts, starts_kv=starts)
    options = Options(enable_gqa=True)
    return [*packed.describe(given, 512, 512, options, Terms(), True, device).graphs]


def _paged(queries: int) -> Specs:
    pages, pool = _meta(2, 32, dtype=torch.int32), _meta(64, 2, 16, 128)
    given = Given(_meta(2, 8, queries, 128), pool, pool, lengths_kv=_LENGTHS)
    terms = Terms(right=0, bottom_right=True)
    options = Options(enable_gqa=True)
    return lambda device: [*paged.describe(given, pages, options, terms, device).graphs]


if __name__ == "__main__":
    print(table())
