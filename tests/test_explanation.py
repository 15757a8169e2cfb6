"""`explain` for calls that `F.scaled_dot_product_attention` cannot say; no GPU is needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_mha import config, devices, explain, explain_paged, explain_varlen
from cudnn_mha.cache import plans
from cudnn_mha.explanation import REFERENCE

SHAPE = (2, 8, 200, 64)
TOKENS = (500, 8, 64)
PAGES = (40, 2, 16, 64)


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plans.cache_clear()
    monkeypatch.setattr(
        plans, "_build", lambda spec, *_: SimpleNamespace(spec=spec, engine="eng", workspace=0)
    )
    yield
    plans.cache_clear()


def flags(spec: str) -> set[str]:
    """What a graph in words has behind its tensors and its scale."""
    words = spec.split()
    return set(words[[word.startswith("scale=") for word in words].index(True) + 1 :])


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# ----------------------------------------------------------------------------------------- padded


def test_a_window_is_compiled_and_told() -> None:
    verdict = explain(SHAPE, SHAPE, SHAPE, window=(64, 0), requires_grad=True, gpu="h200")
    assert verdict.served
    assert (verdict.reasons, verdict.runs, verdict.lengths) == ((), "cuDNN", None)
    forward, backward = verdict.graphs
    assert flags(forward.spec) == {"left=64", "causal", "lse"}
    assert flags(backward.spec) == {"left=64", "causal", "padding"}
    for graph in verdict.graphs:
        assert graph.engine is not None
        assert graph.engine.startswith("eng")
        assert graph.workspace is not None
    assert forward.remedies == ()
    assert len(backward.remedies) == 1
    assert backward.remedies[0].startswith("a padding mask that states the full lengths")


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"window": (8, 4)}, {"left=8", "right=4"}),
        ({"window": (8, -1), "is_causal": True}, {"left=8", "causal"}),
        ({"window": (-1, -1)}, set()),
        ({"softcap": 20}, {"softcap=20"}),
        ({"softcap": 0}, set()),
        ({"alibi": True}, {"slopes"}),
        ({"alibi": True, "is_causal": True}, {"alibi", "causal"}),
        ({"alibi_slopes": True, "is_causal": True}, {"slopes", "causal"}),
        ({"alibi_slopes": False, "is_causal": True}, {"causal"}),
        ({"sinks": True}, {"sinks"}),
        ({"sinks": meta(8, dtype=torch.float32)}, {"sinks"}),
        ({"causal_alignment": "bottom_right", "is_causal": True}, {"causal"}),
    ],
)
def test_every_argument_is_in_the_graph(options: dict[str, Any], found: set[str]) -> None:
    verdict = explain(SHAPE, SHAPE, SHAPE, **options, gpu="h200")
    assert verdict.served
    (graph,) = verdict.graphs
    assert flags(graph.spec) == found
    assert (graph.engine, graph.workspace) == ("eng", 0)


@pytest.mark.usefixtures("nothing_is_compiled")
def test_the_bottom_right_diagonal_of_other_lengths() -> None:
    longer = (2, 8, 300, 64)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    (graph,) = explain(SHAPE, longer, longer, **options, gpu="a10").graphs
    assert flags(graph.spec) == {"causal", "bottom_right"}
    (graph,) = explain(longer, SHAPE, SHAPE, **options, gpu="a10").graphs
    assert flags(graph.spec) == {"causal", "bottom_right", "padding"}
    assert "Sq > Skv" in graph.remedies[0]


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(
    ("gpu", "options", "manner", "found"),
    [
        ("h200", {"seq_lens_q": True}, "ragged", {"lengths", "ragged"}),
        ("h200", {"seq_lens_kv": True}, "ragged", {"lengths", "ragged"}),
        ("a10", {"seq_lens_kv": True}, "cleaned", {"lengths"}),
    ],
)
def test_how_lengths_are_told(
    gpu: str, options: dict[str, Any], manner: str, found: set[str]
) -> None:
    verdict = explain(SHAPE, SHAPE, SHAPE, **options, gpu=gpu)
    assert verdict.served
    assert verdict.lengths is not None
    assert verdict.lengths.partition(":")[0] == manner
    (graph,) = verdict.graphs
    assert flags(graph.spec) == found
    assert f"  lengths: {verdict.lengths}" in str(verdict).splitlines()
    assert json.loads(json.dumps(verdict.to_dict()))["lengths"] == verdict.lengths


@pytest.mark.usefixtures("nothing_is_compiled")
def test_one_query_with_lengths_of_keys_is_a_cache() -> None:
    verdict = explain((2, 8, 1, 64), SHAPE, SHAPE, seq_lens_kv=True, gpu="h200")
    assert verdict.lengths is not None
    assert verdict.lengths.startswith("cache: ")
    # Here the graph is a ragged one too, yet the call has no lengths.
    assert explain((2, 8, 1, 64), SHAPE, SHAPE, sinks=True, gpu="h200").lengths is None


@pytest.mark.usefixtures("nothing_is_compiled")
def test_the_gradient_of_sinks_is_that_of_the_tensor() -> None:
    def backward(sinks: Tensor | bool, **options: Any) -> set[str]:
        verdict = explain(SHAPE, SHAPE, SHAPE, sinks=sinks, gpu="h200", **options)
        return flags(verdict.graphs[1].spec)

    fixed = meta(8, dtype=torch.float32)
    assert "grad_sinks" in backward(True, requires_grad=True)
    assert "grad_sinks" not in backward(fixed, requires_grad=True)
    learnt = fixed.clone().requires_grad_()
    assert "grad_sinks" in backward(learnt)  # that is a gradient wanted, too


@pytest.mark.usefixtures("nothing_is_compiled")
def test_who_computes_instead() -> None:
    verdict = explain(SHAPE, SHAPE, SHAPE, seq_lens_kv=True, alibi_slopes=True, gpu="h200")
    assert not verdict.served
    assert [reason.rule for reason in verdict.reasons] == ["score_operations"]
    assert verdict.runs == REFERENCE
    (graph,) = verdict.graphs
    assert (graph.engine, graph.workspace) == (None, None)
    large = (2**12, 8, 2**12, 512)
    verdict = explain(large, large, large, window=(1, 1), gpu="a10")
    assert [reason.rule for reason in verdict.reasons] == ["memory"]
    assert verdict.runs.startswith("nothing, ")
    assert verdict.graphs[0].engine is None


# Half precision would not help these.
OTHER_DTYPES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "ordinary": (
        lambda **o: explain(*((2, 4, 1, 520),) * 3, dropout_p=0.3, requires_grad=True, **o),
        {"gpu": "a10"},
        ["dtype", "dropout", "single_token", "head_dim"],
    ),
    "padded": (
        lambda **o: explain(SHAPE, SHAPE, SHAPE, softcap=2.0, seq_lens_kv=True, **o),
        {"gpu": "h200"},
        ["dtype", "score_operations"],
    ),
    "packed": (
        lambda **o: explain_varlen(*(TOKENS,) * 3, (4,), (4,), 200, 200, softcap=2.0, **o),
        {"gpu": "h200"},
        ["dtype", "score_operations"],
    ),
    "paged": (
        lambda **o: explain_paged((2, 8, 1, 64), *((40, 2, 12, 64),) * 2, (2, 5), **o),
        {"gpu": "h200"},
        ["dtype", "page_size"],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call", OTHER_DTYPES)
def test_reasons_besides_the_dtype_are_named(call: str, dtype: torch.dtype) -> None:
    ask, options, rules = OTHER_DTYPES[call]
    verdict = ask(**options, dtype=dtype)
    assert [reason.rule for reason in verdict.reasons] == rules
    assert [r.rule for r in ask(**options).reasons] == rules[1:]
    name = str(dtype).removeprefix("torch.")
    assert verdict.reasons[0].message.startswith(
        f"query, key and value must be float16 or bfloat16, got {name}; "
    )
    assert f":{name}" in verdict.graphs[0].spec


def test_a_dtype_that_no_graph_has_is_named() -> None:
    verdict = explain(SHAPE, SHAPE, SHAPE, dtype=torch.float8_e4m3fn, gpu="h200")
    assert [reason.message for reason in verdict.reasons] == [
        "query, key and value must be float16 or bfloat16, got float8_e4m3fn; cast them or use "
        "torch.autocast"
    ]
    assert verdict.graphs == ()


def test_where_the_tensors_are() -> None:
    q = torch.zeros(1, 2, 8, 16, dtype=torch.float16)
    verdict = explain(q, q, q, softcap=2.0)
    assert [reason.message for reason in verdict.reasons] == [
        "the tensors must be on a CUDA device, got cpu"
    ]
    assert (verdict.graphs, verdict.device, verdict.runs) == ((), "these tensors", REFERENCE)


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("options", [{}, {"window": (8, 8)}, {"seq_lens_q": True}])
def test_shapes_for_the_gpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """What plans are told lies on the GPU, and shapes are nowhere."""
    here = dataclasses.replace(devices.described("h200"), index=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(devices, "cuda", lambda index: here)
    monkeypatch.setenv(config.LENGTHS, "bucketed")
    config.reload()
    try:
        verdict = explain(SHAPE, SHAPE, SHAPE, **options, requires_grad=True)
    finally:
        monkeypatch.undo()
        config.reload()
    assert verdict.served
    assert verdict.device == "NVIDIA H200 (sm_90, cuda:0)"
    shared = [{"lengths", "ragged"} <= flags(graph.spec) for graph in verdict.graphs]
    assert shared == [options.keys() != {"window"}] * 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 4}, TypeError, r"window must be \(left, right\)"),
        ({"causal_alignment": "right"}, ValueError, "causal_alignment must be one of top_left"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"alibi": 1}, TypeError, "alibi must be True or False, got 1"),
        (
            {"seq_lens_q": [3, 4]},
            TypeError,
            r"seq_lens_q must be a torch.Tensor, True where there is one, or None, got \[3, 4\]",
        ),
        ({"sinks": meta(4)}, ValueError, r"sinks must be of shape \(8,\), got \(4,\)"),
        ({"seq_lens_kv": meta(2)}, TypeError, "seq_lens_kv must be int32 or int64"),
        ({"is_causal": True, "attn_mask": (200, 200)}, RuntimeError, "attn_mask"),
    ],
)
def test_what_means_nothing(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain(SHAPE, SHAPE, SHAPE, **options, gpu="h200")


LSE_GRADIENT: list[tuple[str, int, dict[str, Any], list[str] | None]] = [
    ("h200", 128, {}, []),
    ("h200", 256, {}, ["head_dim"]),
    ("a100-sxm-80gb", 128, {}, ["head_dim"]),
    ("h200", 128, {"seq_lens_kv": True}, []),
    ("h200", 256, {"softcap": 30.0}, ["head_dim"]),
    ("h200", 128, {"return_lse": False}, None),
    ("h200", 128, {"requires_grad": False}, None),
    ("a10", 256, {}, None),  # no backward at all
]


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(("gpu", "dim", "options", "rules"), LSE_GRADIENT)
def test_gradients_of_the_log_sum_exp(
    gpu: str, dim: int, options: dict[str, Any], rules: list[str] | None
) -> None:
    shape = (2, 4, 128, dim)
    asked = {"return_lse": True, "requires_grad": True} | options
    verdict = explain(shape, shape, shape, gpu=gpu, **asked)
    found = verdict.lse_gradient
    assert (None if found is None else [reason.rule for reason in found]) == rules
    assert ("gradient of the log-sum-exp: " in str(verdict)) == (rules is not None)
    assert ("gradient of the log-sum-exp: served by cuDNN" in str(verdict)) == (rules == [])


# ----------------------------------------------------------------------------------------- packed


@pytest.mark.usefixtures("nothing_is_compiled")
def test_packed_sequences() -> None:
    """One plan for all lengths up to the next power of two, and for as many tokens."""
    verdict = explain_varlen(
        TOKENS, TOKENS, TOKENS, (4,), (4,), 200, 200, is_causal=True, requires_grad=True,
        gpu="h200",
    )  # fmt: skip
    assert (verdict.served, verdict.runs) == (True, "cuDNN")
    assert verdict.lengths is not None
    assert verdict.lengths.startswith("ragged: ")
    forward, backward = verdict.graphs
    assert flags(forward.spec) == {"causal", "lse", "lengths", "ragged"}
    assert flags(backward.spec) == {"causal", "lengths", "ragged"}
    assert forward.spec.startswith("forward query=4x8x256x64:bfloat16@(131072, 64, 512, 1) ")


@pytest.mark.usefixtures("nothing_is_compiled")
def test_packed_sequences_that_are_padded() -> None:
    """Where cuDNN has no gradient of packed sequences."""
    starts = meta(4, dtype=torch.int64)
    verdict = explain_varlen(
        meta(*TOKENS), TOKENS, TOKENS, starts, starts, 200, 150, gpu="a10", requires_grad=True
    )
    assert (verdict.served, verdict.runs) == (True, "cuDNN, on a padded batch")
    assert verdict.lengths is not None
    assert verdict.lengths.startswith("cleaned: ")
    graph, _ = verdict.graphs
    assert flags(graph.spec) == {"lengths", "lse"}
    assert graph.spec.startswith("forward query=3x8x200x64:bfloat16@(102400, 64, 512, 1) "
                                 "key=3x8x150x64:bfloat16@")  # fmt: skip


def test_packed_sequences_without_any() -> None:
    for starts, longest in (((1,), 200), ((4,), 0)):
        verdict = explain_varlen(
            TOKENS, TOKENS, TOKENS, starts, starts, longest, longest, gpu="h200"
        )
        assert [reason.rule for reason in verdict.reasons] == ["empty"]
        assert (verdict.runs, verdict.graphs, verdict.lengths) == (REFERENCE, (), None)
    with pytest.raises(ValueError, match=r"query must be packed, \(tokens, H, D\)"):
        explain_varlen(SHAPE, SHAPE, SHAPE, (3,), (3,), 8, 8, gpu="h200")


# ------------------------------------------------------------------------------------------ pages


@pytest.mark.usefixtures("nothing_is_compiled")
def test_pages() -> None:
    q = (2, 8, 1, 64)
    verdict = explain_paged(q, PAGES, PAGES, (2, 5), is_causal=True, gpu="h200")
    assert (verdict.served, verdict.runs) == (True, "cuDNN")
    assert verdict.lengths == "paged: by lengths and the pages of each sequence"
    (graph,) = verdict.graphs
    assert flags(graph.spec) == {"page_table=2x1x5x1:int32", "lengths"}
    assert "key=40x2x16x64:bfloat16 " in graph.spec
    other = (40, 16, 2, 64)
    (graph,) = explain_paged(q, other, other, (2, 5), page_layout="NHD", gpu="h200").graphs
    assert "key=40x2x16x64:bfloat16@(2048, 64, 128, 1) " in graph.spec
    with pytest.raises(ValueError, match="page_layout must be one of HND, NHD, got 'DHN'"):
        explain_paged(q, PAGES, PAGES, (2, 5), page_layout="DHN", gpu="h200")
    with pytest.raises(ValueError, match=r"block_table must be of shape \(B, M\) with B = 2"):
        explain_paged(q, PAGES, PAGES, (3, 5), gpu="h200")


def test_pages_without_any() -> None:
    verdict = explain_paged((2, 8, 1, 64), PAGES, PAGES, (2, 0), gpu="h200")
    assert [reason.rule for reason in verdict.reasons] == ["empty"]
    assert (verdict.runs, verdict.graphs) == (REFERENCE, ())


def test_a_dtype_is_one_of_pytorchs() -> None:
    wrong: Any = "bfloat16"
    with pytest.raises(
        TypeError, match=r"the dtype of query must be a torch\.dtype, .* 'bfloat16'"
    ):
        explain((1, 2, 8, 64), (1, 2, 8, 64), (1, 2, 8, 64), gpu="h200", dtype=wrong)
