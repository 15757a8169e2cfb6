"""Hugging Face models under ``attn_implementation="cudnn_mha"`` against their own eager attention.

On the CPU all masks are dense; the fixture ``way`` also takes the ways of a GPU there, with the
reference in place of cuDNN.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import padded_models
from cudnn_mha import config, dispatch, packed, sequences
from cudnn_mha.functional import cudnn_sdpa
from cudnn_mha.functional_layouts import cudnn_sdpa_varlen
from tests.support import no_waits
from tests.test_autoload import run

transformers: Any = pytest.importorskip("transformers")
masking: Any = importlib.import_module("transformers.masking_utils")
hf: Any = importlib.import_module("cudnn_mha.integrations.transformers")
masks: Any = importlib.import_module("cudnn_mha.integrations.transformers_masks")

WORDS, BATCH, LENGTH = 64, 3, 12
TOLERANCE = 2e-5  # of float32, for two ways to compute the same in two layers

SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SEQ2SEQ = {
    "vocab_size": WORDS,
    "d_model": 32,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout_rate": 0.0,
    "dropout": 0.0,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 5}),
    "mistral-wide": ("Mistral", {**GROUPED, "sliding_window": 40}),
    "gemma2": ("Gemma2", {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gpt-oss": (
        "GptOss",
        {
            **GROUPED,
            "sliding_window": 5,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2": ("Qwen2", {k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "qwen3": ("Qwen3", GROUPED),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", SIZES),
    "modernbert": (
        "ModernBert",
        {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1}
        | {"sep_token_id": 2, "deterministic_flash_attn": False},
    ),
}


def build(kind: str, head: str, options: dict[str, Any], **more: Any) -> Any:
    """A model with random weights, large enough that attention is far from uniform."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, kind + head)(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            elif "sinks" in name:
                parameter.normal_()
    return model.eval()


def with_attention(model: Any, implementation: str) -> Any:
    """The same model, made for it: T5 does not take another attention later."""
    made = transformers.AutoModelForSeq2SeqLM.from_config(
        copy.deepcopy(model.config), attn_implementation=implementation
    )
    made.load_state_dict(model.state_dict())
    return made.eval()


@functools.cache
def decoder(name: str) -> Any:
    kind, options = DECODERS[name]
    return build(kind, "ForCausalLM", options)


@functools.cache
def encoder(name: str) -> Any:
    kind, options = ENCODERS[name]
    return build(kind, "ForMaskedLM", options)


def tokens(seed: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def padding(kind: str, length: int = LENGTH) -> Tensor | None:
    """A mask ``(B, S)``; the last sequence is never padded."""
    if kind == "none":
        return None
    kept = torch.ones(BATCH, length, dtype=torch.long)
    if kind in ("right", "ends"):
        kept[0, 7:] = 0
    if kind in ("left", "ends"):
        kept[1, :4] = 0
    if kind == "holes":
        kept[0, 3:5] = 0
        kept[0, 10:] = 0
        kept[1, :2] = 0
    return kept


CASES = [
    *(("dense", kind) for kind in ("none", "right", "left", "holes")),
    *(("terms", kind) for kind in ("none", "ones", "right", "left", "holes")),
    *(("promised", kind) for kind in ("none", "right", "left", "ends")),
]
"""Ways, and what padding to try them on."""


class Ways:
    """What the adapter calls, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def spy(self, function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **(kwargs | changes))
            self.calls.append((function.__name__, kwargs))
            return result

        return call

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.calls}

    @property
    def dense(self) -> bool:
        """Some call had a mask of all scores."""
        given = [call.get("attn_mask") for _, call in self.calls]
        return any(mask is not None and mask.shape[2] > 1 for mask in given)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are small
    hf.register()
    yield
    hf.register()
    torch.set_num_threads(threads)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Ways:
    ways = Ways()
    monkeypatch.setattr(hf, "_for_cudnn", lambda query: True)
    monkeypatch.setattr(hf, "cudnn_sdpa", ways.spy(cudnn_sdpa, fallback=True))
    monkeypatch.setattr(hf, "cudnn_sdpa_varlen", ways.spy(cudnn_sdpa_varlen, fallback=True))
    return ways


@pytest.fixture(params=["dense", "terms"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param != "dense":
        request.getfixturevalue("as_on_a_gpu")
    if request.param == "promised":
        hf.register(padding="ends")
    return str(request.param)


def outcome(
    model: Any, implementation: str, inputs: dict[str, Any], real: Tensor, *, gradient: bool = True
) -> dict[str, Tensor]:
    """Logits of real rows, the loss on them, and every gradient."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    with torch.set_grad_enabled(gradient):
        output = model(**inputs)
        name = "logits" if "logits" in output else "last_hidden_state"
        logits = output[name][real]
        found = {"logits": logits.detach()}
        if gradient:
            loss = output.loss if output.get("loss") is not None else logits.square().mean()
            found["loss"] = loss.detach()
            loss.backward()
            for key, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[key] = parameter.grad.clone()
    return found


def assert_close(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        error = (ours[name] - value).abs().max()
        assert error <= TOLERANCE * max(1.0, float(value.abs().max())), name


def assert_agrees(model: Any, inputs: dict[str, Any], real: Tensor, **options: Any) -> None:
    expected = outcome(model, "eager", inputs, real, **options)
    assert_close(outcome(model, "cudnn_mha", inputs, real, **options), expected)


def causal_inputs(kind: str) -> tuple[dict[str, Any], Tensor]:
    words, kept = tokens(), padding(kind)
    real = torch.ones_like(words, dtype=torch.bool) if kept is None else kept.bool()
    labels = words.masked_fill(~real, -100)
    # The first real token after padding is predicted from padding: no row to compare.
    labels[:, 1:].masked_fill_(~real[:, :-1], -100)
    return {"input_ids": words, "attention_mask": kept, "labels": labels}, real


# ----------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(("way", "kind"), CASES, indirect=["way"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, kind: str, way: str) -> None:
    inputs, real = causal_inputs(kind)
    assert_agrees(decoder(name), inputs, real)


@pytest.mark.parametrize("kind", ["ones", "left", "ends", "holes"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "llama"])
def test_without_gradients_the_mask_is_looked_at(name: str, kind: str, as_on_a_gpu: Ways) -> None:
    inputs, real = causal_inputs(kind)
    assert_agrees(decoder(name), inputs, real, gradient=False)
    if name != "gemma2":
        together = kind in ("right", "left", "ends") or (kind == "holes" and name == "llama")
        assert as_on_a_gpu.names == {"cudnn_sdpa_varlen" if together else "cudnn_sdpa"}
    assert not as_on_a_gpu.dense


@pytest.mark.parametrize(("way", "kind"), CASES, indirect=["way"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_agree_in_every_row(name: str, kind: str, way: str) -> None:
    words = tokens()
    every = torch.ones_like(words, dtype=torch.bool)
    inputs = {"input_ids": words, "attention_mask": padding(kind), "labels": words}
    if name == "modernbert" and kind != "none":  # rows whose whole window is padding see nothing
        kept = padding(kind)
        assert kept is not None
        every = kept.bool()
        inputs["labels"] = words.masked_fill(~every, -100)
    assert_agrees(encoder(name), inputs, every)


def test_vision(way: str) -> None:
    options = {**SIZES, "image_size": 16, "patch_size": 4}
    for name in ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id"):
        del options[name]
    model = build("ViT", "Model", options, add_pooling_layer=False)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    assert_agrees(model, inputs, torch.ones(2, 17, dtype=torch.bool))


@pytest.mark.parametrize(("way", "kind"), CASES, indirect=["way"])
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_decoders(name: str, kind: str, way: str) -> None:
    if name == "T5":
        sizes = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        model = build("T5", "ForConditionalGeneration", SEQ2SEQ | sizes)
    else:
        sizes = {"max_position_embeddings": 64}
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
        model = build("Bart", "ForConditionalGeneration", SEQ2SEQ | sizes)
    target = tokens(2, 9)
    kept = padding(kind, 9)
    ours = with_attention(model, "cudnn_mha")
    real = torch.ones_like(target, dtype=torch.bool) if kept is None else kept.bool()
    inputs = {
        "input_ids": tokens(),
        "attention_mask": padding(kind),
        "decoder_input_ids": target,
        "decoder_attention_mask": kept,
        "labels": target.masked_fill(~real, -100),
    }
    expected = outcome(with_attention(model, "eager"), "eager", inputs, real)
    assert_close(outcome(ours, "cudnn_mha", inputs, real), expected)
    if name == "T5":
        inner = ours.encoder.block[0].layer[0].SelfAttention.config
        assert inner._attn_implementation == "cudnn_mha"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])  # gpt-oss makes nothing of them
def test_packed_position_ids(name: str, way: str) -> None:
    starts = [torch.tensor([0, 3, 12]), torch.tensor([0, 7, 8, 12]), torch.tensor([0, 12])]
    positions = torch.stack([torch.cat([torch.arange(n) for n in s.diff()]) for s in starts])
    words = tokens()
    inputs = {"input_ids": words, "position_ids": positions, "use_cache": False, "labels": words}
    assert_agrees(decoder(name), inputs, torch.ones_like(words, dtype=torch.bool))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_packed_by_their_starts(name: str, way: str) -> None:
    """The expected values are those of each sequence alone."""
    starts = torch.tensor([0, 5, 6, 14, 36], dtype=torch.int32)
    words = tokens().reshape(1, -1)
    model = decoder(name)
    model.set_attn_implementation("eager")
    model.zero_grad()
    parts = words.split(starts.diff().tolist(), dim=1)
    logits = torch.cat([model(input_ids=part).logits[0] for part in parts])
    logits.square().mean().backward()
    expected = {"logits": logits.detach(), "loss": logits.detach().square().mean()}
    expected |= {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    inputs = {
        "input_ids": words,
        "position_ids": torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        "use_cache": False,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
    }
    every = torch.ones_like(words, dtype=torch.bool)
    assert_close(outcome(model, "cudnn_mha", inputs, every), expected)
    inputs |= {"max_length_q": 22, "max_length_k": 22}
    assert_close(outcome(model, "cudnn_mha", inputs, every), expected)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_the_callers_own(additive: bool, way: str) -> None:
    """As it is: without causality, which it would have to hold."""
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    floats = torch.zeros(seen.shape).masked_fill(~seen, lowest)
    model, words = decoder("llama"), tokens()
    every = torch.ones_like(words, dtype=torch.bool)
    expected = outcome(model, "eager", {"input_ids": words, "attention_mask": floats}, every)
    given = floats if additive else seen
    ours = outcome(model, "cudnn_mha", {"input_ids": words, "attention_mask": given}, every)
    assert_close(ours, expected)


# ------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_generation(name: str, kind: str, cache: str, as_on_a_gpu: Ways) -> None:
    model = decoder(name)
    found = {}
    for implementation in ("eager", "cudnn_mha"):
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            tokens(),
            attention_mask=padding("ones" if kind == "none" else kind),
            max_new_tokens=8,
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert found["cudnn_mha"].sequences.shape == (BATCH, LENGTH + 8)
    assert found["cudnn_mha"].sequences.equal(found["eager"].sequences)
    for ours, expected in zip(found["cudnn_mha"].logits, found["eager"].logits, strict=True):
        assert_close({"logits": ours}, {"logits": expected})
    if cache == "dynamic":
        assert not as_on_a_gpu.dense


def test_encoder_decoders_generate(as_on_a_gpu: Ways) -> None:
    sizes = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = build("T5", "ForConditionalGeneration", SEQ2SEQ | sizes)
    found = []
    for implementation in ("eager", "cudnn_mha"):
        made = with_attention(model, implementation)
        mask = padding("right")
        found.append(made.generate(tokens(), attention_mask=mask, max_new_tokens=6))
    assert found[0].equal(found[1])


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # by newer versions
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_several_queries_look_into_a_cache(name: str, as_on_a_gpu: Ways) -> None:
    model, words = decoder(name), tokens()
    model.set_attn_implementation("eager")
    kept = padding("left")
    with torch.no_grad():
        expected = model(input_ids=words, attention_mask=kept).logits[:, 8:]
        for mask in (None, kept):
            model.set_attn_implementation("cudnn_mha")
            first = None if mask is None else mask[:, :8]
            cache = model(input_ids=words[:, :8], attention_mask=first).past_key_values
            more = {"attention_mask": mask, "past_key_values": cache}
            found = model(input_ids=words[:, 8:], **more).logits
            rows = slice(2, 3) if mask is None else slice(None)  # the others are padded
            assert_close({"logits": found[rows]}, {"logits": expected[rows]})
    assert not as_on_a_gpu.dense


# ----------------------------------------------------------------------------- what is not allowed


class NoHostReads(TorchDispatchMode):
    """Fails where a value would have to be read back from a device."""

    READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "equal")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        boolean = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in self.READS or boolean:
            raise AssertionError(f"{name} reads from the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["dense", "terms", "promised"], indirect=True)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_a_training_step_reads_nothing_back(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(name) if name in DECODERS else encoder(name)
    model.set_attn_implementation("cudnn_mha")
    if name == "gpt-oss":
        model = copy.deepcopy(model)
        model.set_experts_implementation("batched_mm")
    inputs, _ = causal_inputs("ends")

    def refuse(*_: object) -> None:
        raise AssertionError("a list is read from the device")

    monkeypatch.setattr(Tensor, "tolist", refuse)  # which no mode sees
    for module in (packed, sequences):  # on the CPU lengths are looked at
        monkeypatch.setattr(module, "on_host", lambda *_: False)
    with NoHostReads():
        model(**inputs).loss.backward()


def test_the_mode_sees_reads() -> None:
    for read in (torch.ones(2).sum().item, torch.ones(2).nonzero, torch.ones(2).bool().any().item):
        with NoHostReads(), pytest.raises(AssertionError, match="reads from the device"):
            read()


def test_a_broken_promise_raises() -> None:
    hf.register(padding="ends")
    model = decoder("llama")
    model.set_attn_implementation("cudnn_mha")
    inputs, _ = causal_inputs("holes")
    with pytest.raises(RuntimeError, match=r"zeros between ones.*padding='any'"):
        model(**inputs)


def direct(**kwargs: Any) -> Tensor:
    """One layer's attention on arguments of its own."""
    module = torch.nn.Module()
    shape = kwargs.pop("shape", (2, 4, 6, 8))
    torch.manual_seed(0)
    query, key, value = (torch.randn(shape) for _ in range(3))
    mask = kwargs.pop("attention_mask", None)
    output: Tensor = hf.attention(module, query, key, value, mask, **kwargs)[0]
    return output


STARTS = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"output_attentions": True}, "output_attentions must be False"),
        ({"indices": torch.ones(1)}, "indices is no argument"),
        ({"head_mask": torch.ones(4)}, "head_mask is no argument"),
        ({"attention_mask": torch.ones(2, 6)}, "attention_mask must have 4 dimensions"),
        ({"sliding_window": 3, "is_causal": False}, "sliding_window must come with"),
        ({"cu_seq_lens_q": STARTS}, "cu_seq_lens_k must both"),
        ({"max_length_q": 3}, "cu_seq_lens_k must both"),
        ({"cu_seq_lens_q": STARTS[None, None], "cu_seq_lens_k": STARTS}, "cu_seq_lens_q must be"),
        (
            {
                "cu_seq_lens_q": STARTS,
                "cu_seq_lens_k": STARTS,
                "attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool),
            },
            "attention_mask must be None",
        ),
        (
            {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "position_bias": torch.ones(1)},
            "position_bias is not served",
        ),
    ],
)
def test_nothing_is_ignored(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        direct(**kwargs)


def test_what_attention_has_no_use_for_is_accepted() -> None:
    handed_on = dict.fromkeys(hf.HARMLESS, torch.ones(1))
    refused = {"output_attentions": False, "head_mask": None}
    assert direct(**handed_on, **refused).equal(direct())


def test_all_that_models_hand_on_is_known() -> None:
    parameters = inspect.signature(hf.attention).parameters
    utilities = importlib.import_module("transformers.utils")
    for name in utilities.TransformersKwargs.__annotations__:
        assert name in parameters or name in hf.HARMLESS or name == "output_attentions"


@pytest.mark.parametrize("window", [2, 6, 9])
def test_a_window_without_a_mask(window: int, way: str) -> None:
    position = torch.arange(6)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < window)
    expected = direct(attention_mask=seen[None, None])
    found = direct(sliding_window=window)
    assert (found - expected).abs().max() < 1e-6


def test_one_query_sees_the_last_keys_of_its_window(way: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    module = torch.nn.Module()
    found, _ = hf.attention(module, query, key, value, None, sliding_window=3)
    expected, _ = hf.attention(module, query, key[:, :, 4:], value[:, :, 4:], None)
    assert (found - expected).abs().max() < 1e-6


def test_deterministic_is_handed_on(as_on_a_gpu: Ways) -> None:
    direct(deterministic=True)
    direct(deterministic=False)
    assert [call["deterministic"] for _, call in as_on_a_gpu.calls] == [True, None]


# ------------------------------------------------------------------------------------------- masks

SEGMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("make", "bounds"),
    [
        (lambda: masking.causal_mask_function, (None, 0)),
        (lambda: masking.bidirectional_mask_function, (None, None)),
        (lambda: masking.sliding_window_causal_mask_function(3), (2, 0)),
        (lambda: masking.sliding_window_bidirectional_mask_function(2), (2, 2)),
        (
            lambda: masking.and_masks(
                masking.sliding_window_causal_mask_function(4),
                masking.packed_sequence_mask_function(SEGMENTS),
            ),
            (3, 0),
        ),
    ],
)
def test_patterns_are_transformers_own(
    make: Any, bounds: tuple[int | None, int | None], padded: bool, offset: int
) -> None:
    function = make()
    found = masks.bounds_of(function)
    assert found[:2] == bounds
    if found.segments is not None and offset:
        pytest.skip("packed sequences have no cache")
    kept = torch.rand(2, 5 + offset) < 0.7 if padded else None
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 5, "kv_length": 5 + offset}
    sizes |= {"q_offset": offset, "mask_function": function, "attention_mask": kept}
    expected = masking.sdpa_mask(**sizes, allow_is_causal_skip=False)
    ours = hf.mask(**sizes)
    assert isinstance(ours, masks.PatternMask)
    assert ours.shape == expected.shape == (2, 1, 5, 5 + offset)
    assert (~ours).equal(~expected)  # whatever computes with it gets the mask itself
    assert ours[:, :, -1:].float().equal(expected[:, :, -1:].float())


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: k <= q,
        masking.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.long)),
        masking.or_masks(masking.causal_mask_function, masking.sliding_window_overlay(2)),
        masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: q - k != 1),
    ],
)
def test_other_patterns_are_masks_of_all_scores(function: Any) -> None:
    assert masks.bounds_of(function) is None
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5, "mask_function": function}
    with NoHostReads():
        ours = hf.mask(**sizes, attention_mask=torch.rand(2, 5) < 0.7)
    assert type(ours) is Tensor
    assert ours.shape == (2, 1, 5, 5)


def test_a_mask_of_another_size_than_the_scores_is_a_plain_mask() -> None:
    """A model may drop keys after it asked for its mask: PyTorch then says that it does not fit."""
    mask = hf.mask(batch_size=2, q_length=6, kv_length=9, q_offset=3)
    with pytest.raises(ValueError, match=r"^attention_mask must broadcast to"):
        direct(attention_mask=mask)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scaling": float("nan")}, "scaling must be finite"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\], got 1.5"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"s_aux": torch.ones(3)}, r"s_aux must be of shape \(4,\), got \(3,\)"),
        ({"s_aux": 1}, "s_aux must be a torch.Tensor or None, got int"),
        (
            {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS + 1},
            "cu_seq_lens_k must .* end at 12, the number of tokens, or less, got 1 and 13",
        ),
    ],
)
def test_errors_name_what_transformers_calls_its_arguments(
    kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        direct(**kwargs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that the compiler itself looks at
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt-oss"])
def test_compiled_models(name: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    model = copy.deepcopy(decoder(name))
    inputs, real = causal_inputs("ends")
    del inputs["labels"]
    model.set_attn_implementation("cudnn_mha")
    expected = model(**inputs).logits[real]
    if fullgraph:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(**inputs).logits[real]
    else:  # the mask is made outside of what is compiled
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
        found = model(**inputs, use_cache=False).logits[real]
    assert_close({"logits": found.detach()}, {"logits": expected.detach()})


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # by newer versions
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints(reentrant: bool, as_on_a_gpu: Ways) -> None:
    model = copy.deepcopy(decoder("llama"))
    inputs, real = causal_inputs("holes")
    inputs["use_cache"] = False
    model.train()
    expected = outcome(model, "eager", inputs, real)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_close(outcome(model, "cudnn_mha", inputs, real), expected)


# ---------------------------------------------------------------------------------------- register


def test_register_knows_its_option() -> None:
    with pytest.raises(ValueError, match="padding must be one of any, ends, got 'right'"):
        hf.register(padding="right")
    hf.register()
    assert transformers.AttentionInterface._global_mapping["cudnn_mha"] is hf.attention
    assert masking.AttentionMaskInterface._global_mapping["cudnn_mha"] is hf.mask


REPORT = """
import json, sys
{first}
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
known = ["cudnn_mha" in i._global_mapping for i in (AttentionInterface, AttentionMaskInterface)]
import transformers.masking_utils
whole = transformers.masking_utils.AttentionMaskInterface is AttentionMaskInterface
print(json.dumps({{"known": known, "whole": whole,
    "finders": [f for f in map(str, sys.meta_path) if "cudnn_mha" in f]}}))
"""


@pytest.mark.parametrize("first", ["", "import transformers.modeling_utils"])
def test_the_variable_registers_it(first: str) -> None:
    """Whichever comes first, PyTorch or the part of transformers that loads PyTorch."""
    found, errors = run(REPORT.format(first=first), **{config.ENABLED: "1"})
    assert found == {"known": [True, True], "whole": True, "finders": []}
    assert "cudnn_mha is not registered" not in errors


def test_without_transformers_nothing_is_loaded() -> None:
    code = (
        "import json, sys, torch; names = [n for n in sys.modules if n.split('.')[0] == "
        "'transformers' or n.startswith('cudnn_mha.integrations.transformers')];"
        "finders = [f for f in map(str, sys.meta_path) if 'cudnn_mha' in f];"
        "print(json.dumps({'names': names, 'finders': len(finders)}))"
    )
    found, errors = run(code, **{config.ENABLED: "1"})
    assert found == {"names": [], "finders": 1}
    assert errors == ""


def test_it_never_breaks_the_import(tmp_path: Any) -> None:
    """A transformers that the adapter cannot be registered with."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_utils.py").write_text("value = 7\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import json, torch;"
        "from transformers import modeling_utils; import transformers.modeling_utils as again;"
        "print(json.dumps({'value': again.value, 'same': again is modeling_utils}))"
    )
    found, errors = run(code, **{config.ENABLED: "1"}, PYTHONWARNINGS="error::RuntimeWarning")
    assert found == {"value": 7, "same": True}
    assert "cudnn_mha is not registered with transformers.modeling_utils" in errors
    assert "pip install 'transformers>=5.17'" in errors


# --------------------------------------------------------------------------------------------- GPU

LARGE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FLOOR = 2**-8
"""What errors may be apart where both are no more than rounding."""


def on_gpu(name: str, kind: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any], Tensor]:
    """A model whose weights ``dtype`` has exactly, its inputs and its real rows."""
    options = dict(LARGE)
    if name in ENCODERS:
        del options["num_key_value_heads"], options["head_dim"]
        model = build(ENCODERS[name][0], "ForMaskedLM", ENCODERS[name][1] | options)
    else:
        small = DECODERS[name][1]
        options |= {"sliding_window": 100} if "sliding_window" in small else {}
        options = {k: v for k, v in options.items() if k in small}
        model = build(DECODERS[name][0], "ForCausalLM", small | options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
            parameter.copy_(parameter.to(dtype))
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, 512, (4, 384), generator=generator).cuda()
    kept = torch.ones_like(words)
    if kind in ("right", "ends"):
        kept[0, 200:] = 0
        kept[1, 17:] = 0
    if kind in ("left", "ends"):
        kept[2, :130] = 0
    if kind == "holes":
        kept[0, 40:90] = 0
        kept[1, 300:] = 0
    real = kept.bool()
    labels = words.masked_fill(~real, -100)
    labels[:, 1:].masked_fill_(~real[:, :-1], -100)
    inputs = {"input_ids": words, "labels": labels}
    if kind != "none":
        inputs["attention_mask"] = kept
    return model.cuda(), inputs, real


OWN_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "mpt": ("Mpt", {"d_model": 32, "n_layers": 1, "n_heads": 4}),
    "rembert": (
        "RemBert",
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "input_embedding_size": 16,
            "output_embedding_size": 16,
        },
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_that_attend_themselves_are_refused(name: str, padded: bool) -> None:
    """They add the mask to the scores, as a number."""
    hf.register()
    model = build(OWN_ATTENTION[name][0], "Model", {"vocab_size": WORDS} | OWN_ATTENTION[name][1])
    model.set_attn_implementation("eager")
    words = torch.randint(3, WORDS, (2, 6))
    kept = torch.ones_like(words)
    kept[0, 4:] = 0
    given = {"input_ids": words} | ({"attention_mask": kept} if padded else {})
    model(**given)
    model.config._attn_implementation = "cudnn_mha"
    with pytest.raises(ValueError, match="computes its attention itself"):
        model(**given)


def test_models_with_a_table_of_layers_stop_in_transformers() -> None:
    hf.register()
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
    made = transformers.GPTNeoConfig(**sizes, attention_types=[[["global"], 1]], bos_token_id=1)
    made._attn_implementation = "cudnn_mha"
    with pytest.raises(KeyError, match="'cudnn_mha'"):
        transformers.GPTNeoModel(made)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon(alibi: bool) -> None:
    """With ALiBi it makes a mask of numbers out of ours."""
    falcon = importlib.import_module("transformers.models.falcon.modeling_falcon")
    if hasattr(falcon, "FALCON_ATTENTION_CLASSES"):
        pytest.skip("this release looks its layers up in a table")
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2}
    model = build("Falcon", "Model", sizes | {"num_attention_heads": 4, "alibi": alibi})
    words = torch.randint(3, WORDS, (2, 6))
    kept = torch.ones_like(words)
    kept[0, 4:] = 0
    model.set_attn_implementation("eager")
    want = model(words, attention_mask=kept)[0]
    model.set_attn_implementation("cudnn_mha")
    got = model(words, attention_mask=kept)[0]
    torch.testing.assert_close(got[kept.bool()], want[kept.bool()], rtol=1e-4, atol=1e-4)


def test_masks_are_no_numbers() -> None:
    found = hf.mask(2, 4, 4, device="cpu")
    assert isinstance(found, masks.PatternMask)
    scores = torch.zeros(2, 1, 4, 4)
    for wrong in (lambda: scores + found, lambda: found * -1e9, lambda: 1.0 - found):
        with pytest.raises(ValueError, match="takes a boolean mask for numbers"):
            wrong()
    assert torch.equal(scores.masked_fill(~found, 1.0)[0, 0], torch.ones(4, 4).triu(1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("promise", ["any", "ends"])
@pytest.mark.parametrize("kind", ["none", "right", "ends", "holes"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss", "qwen3", "bert"])
def test_gpu_values(
    name: str,
    kind: str,
    promise: str,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "holes" and promise == "ends":
        pytest.skip("that is no padding at the ends")
    hf.register(padding=promise)
    ways = Ways()
    monkeypatch.setattr(dispatch, "_logged", set())  # each cause is logged once
    monkeypatch.setattr(hf, "cudnn_sdpa", ways.spy(cudnn_sdpa))
    monkeypatch.setattr(hf, "cudnn_sdpa_varlen", ways.spy(cudnn_sdpa_varlen))
    model, inputs, real = on_gpu(name, kind, dtype)
    exact = outcome(model, "eager", inputs, real)
    model = model.to(dtype)
    theirs = "eager" if name in ("gemma2", "gpt-oss") else "sdpa"  # which has no caps and sinks
    known = outcome(model, theirs, inputs, real)
    with caplog.at_level(logging.WARNING, logger="cudnn_mha"):
        ours = outcome(model, "cudnn_mha", inputs, real)
    assert [record.message for record in caplog.records if record.name == "cudnn_mha"] == []
    assert ways.calls
    assert not ways.dense
    for key, value in exact.items():
        scale = float(value.norm()) or 1.0
        error, known_error = (
            float((found[key].float() - value).norm()) / scale for found in (ours, known)
        )
        # Which experts a token goes to turns on the last bit, and with it the routers' gradients.
        factor = 3 if "router" in key else 1.5
        assert error <= factor * known_error + FLOOR, key


@pytest.mark.gpu
@pytest.mark.parametrize("promise", ["any", "ends"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bert"])
def test_gpu_a_training_step_never_waits(name: str, promise: str) -> None:
    hf.register(padding=promise)
    model, inputs, _ = on_gpu(name, "ends", torch.bfloat16)
    model = model.to(torch.bfloat16).train()
    model.set_attn_implementation("cudnn_mha")
    model.config.use_cache = False  # transformers' caches of windows wait when they are made
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # plans are compiled
        step()
    torch.cuda.synchronize()
    with no_waits():
        step()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_gpu_generation(
    name: str, cache: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding says what a forward over all tokens at once says."""
    monkeypatch.setattr(dispatch, "_logged", set())
    model, inputs, _ = on_gpu(name, "left", torch.bfloat16)
    model = model.to(torch.bfloat16)
    model.set_attn_implementation("cudnn_mha")
    words, kept = inputs["input_ids"], inputs["attention_mask"]
    with caplog.at_level(logging.WARNING, logger="cudnn_mha"):
        found = model.generate(
            words,
            attention_mask=kept,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert [record.message for record in caplog.records if record.name == "cudnn_mha"] == []
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    whole = torch.nn.functional.pad(kept, (0, 6), value=1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        given = {"attention_mask": whole, "position_ids": positions}
        expected = exact(input_ids=found.sequences, **given).logits[:, -7:-1]
    ours = torch.stack(found.logits, dim=1).float()
    assert (ours - expected).norm() / expected.norm() < 2**-4


# --------------------------------------------------------------------------------------- benchmark


def test_the_benchmark_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--tiny", "--batch", "3", "--length", "32", "--steps", "2"]
    assert padded_models.main(options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed[1:4]] == list(padded_models.PEERS)
    assert printed[1].endswith("ms   1.000")
    assert float(printed[-1].split()[2].rstrip("%")) < 0.01


def test_the_benchmark_sees_losses_that_differ() -> None:
    def peer(losses: list[float]) -> Any:
        return padded_models.Peer(None, None, lambda: None, losses)

    found = {name: peer([4.0, 3.0]) for name in padded_models.PEERS}
    assert padded_models.disagreement(found) == 0
    found[padded_models.PEERS[2]] = peer([4.0, 3.2])
    assert padded_models.disagreement(found) == pytest.approx(0.05)
