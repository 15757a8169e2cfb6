"""The examples run, and what they print is what they measured."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnn_mha
from cudnn_mha import config, cudnn_sdpa, devices, precompile, recording
from cudnn_mha.inputs import Options
from cudnn_mha.routes import Given
from cudnn_mha.terms import Terms
from tests import support

EXAMPLES = Path(__file__).parent.parent / "examples"
CONTAINER = EXAMPLES / "container"
SCRIPTS = ("train_gpt", "padded_batch", "long_context")
MODULES = (*SCRIPTS, "gpt", "serve", "without_docker", "distributed")

Load = Callable[[str], ModuleType]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are computed faster so, on a busy machine by far."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """An example as a module, found as Python finds it when it is run as a script."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(CONTAINER)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def python(*arguments: str, timeout: float = 120, **variables: str) -> str:
    """What Python prints with these arguments, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)]


@pytest.mark.parametrize("name", [*SCRIPTS, "serve", "without_docker"])
def test_help(load: Load, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = load(name)
    assert module.__doc__ is not None
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert module.__doc__.strip() in printed
    assert "None" not in printed  # a default that is worked out is said in words


SEVERAL = "distributed"  # needs torchrun, which tests/test_example_distributed.py is for


@pytest.mark.parametrize("name", [*SCRIPTS, "serve", "without_docker", SEVERAL])
def test_every_option_says_what_it_is(
    load: Load, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        parsers.append(parser)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(SystemExit):
        load(name).main()
    (parser,) = parsers
    module = load(name)
    assert module.__doc__ is not None and parser.description == module.__doc__
    assert len(parser._actions) > 1
    for action in parser._actions:
        assert action.help, action.option_strings
        if action.default not in (None, False, argparse.SUPPRESS):
            assert "default: " in action.help, action.option_strings


def test_what_is_no_script_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "gpt.py"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "this is no script: run train_gpt.py, padded_batch.py or long_con"
    )


# ----------------------------------------------------------------------------------- training


def test_the_text() -> None:
    text = (EXAMPLES / "sonnets.txt").read_text()
    assert text.isascii()
    sonnets = text.split("\n\n")
    assert len(sonnets) >= 15
    assert {len(sonnet.strip().splitlines()) for sonnet in sonnets} == {14}


def test_tokens_are_characters(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("abca\n")
    tokens, vocabulary = load("gpt").read_text(path)
    assert vocabulary == 4
    assert tokens.tolist() == [1, 2, 3, 1, 0]


def test_the_model_attends_as_it_is_told(load: Load) -> None:
    gpt = load("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Shape(11, 8, layers=2, heads=2, dim=4))
    tokens = torch.randint(11, (3, 8))
    seen: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend([tuple(q.shape), q.stride(), k.stride(), v.stride()])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    loss = model(tokens, tokens, attend)
    # (B, S, 3, H, D) in memory, and no copy of it.
    assert seen == [(3, 2, 8, 4), *3 * [(192, 4, 24, 1)]] * 2
    expected = model(tokens, tokens, lambda q, k, v: cudnn_sdpa(q, k, v, is_causal=True))
    torch.testing.assert_close(loss, expected)
    # The last token decides nothing but its own prediction.
    targets = tokens.index_fill(1, torch.tensor(7), -100)
    other = tokens.index_fill(1, torch.tensor(7), 0)
    torch.testing.assert_close(model(tokens, targets, attend), model(other, targets, attend))


def test_batches_are_stretches_of_the_text(load: Load) -> None:
    module = load("train_gpt")
    text = torch.arange(100)
    size = module.SIZES["tiny"]._replace(batch=50, context=20)
    inputs, targets = module.batches(text, size, seed=3)
    assert inputs.shape == targets.shape == (50, 20)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len(set(inputs[:, 0].tolist())) > 20
    assert torch.equal(module.batches(text, size, seed=3)[0], inputs)
    assert not torch.equal(module.batches(text, size, seed=4)[0], inputs)


def test_training_with_both(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--attention both --size tiny --steps 20 --report 10 --device cpu"
    results = load("train_gpt").main(options.split())
    ours, pytorchs = results["cudnn"], results["pytorch"]
    assert ours.train_loss == pytest.approx(pytorchs.train_loss, abs=1e-3)
    assert ours.validation_loss == pytest.approx(pytorchs.validation_loss, abs=1e-3)
    assert ours.train_loss < 3.3 < math.log(load("gpt").read_text()[1])  # it has learnt something
    printed = capsys.readouterr().out
    assert len(numbers(r"step +\d+  loss (\S+)", printed)) == 4
    speeds = numbers(r"(\S+) tokens/s", printed)
    assert speeds == pytest.approx([r.tokens_per_second for r in results.values()], abs=1)
    assert all(speed > 0 for speed in speeds)


def test_several_processes_train_one_model() -> None:
    options = "--size tiny --batch 4 --steps 4 --report 2 --device cpu"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = python(*torchrun, str(EXAMPLES / "train_gpt.py"), *options.split())
    assert "cudnn attention on 2 x cpu" in printed
    assert len(numbers(r"step +\d+  loss (\S+)", printed)) == 2  # one process reports
    assert len(numbers(r"(\S+) tokens/s", printed)) == 1


# ---------------------------------------------------------------------------- padded batches


def test_padding(load: Load) -> None:
    module = load("padded_batch")
    text = torch.arange(1, 101)
    batch = module.padded(text, 30, shortest=5, longest=16, seed=1)
    lengths = batch.lengths.tolist()
    assert lengths[0] == 16
    assert min(lengths) >= 5 and max(lengths) == 16 and len(set(lengths)) > 5
    for row, length in enumerate(lengths):
        assert torch.equal(batch.targets[row, :length], batch.tokens[row, :length] + 1)
        assert not batch.tokens[row, length:].any()
        assert (batch.targets[row, length:] == -100).all()


def test_both_ways_of_padding_attend_alike(load: Load) -> None:
    module = load("padded_batch")
    batch = module.padded(torch.arange(1, 101), 4, shortest=3, longest=12, seed=1)
    q, k, v = (torch.randn(4, 2, 12, 8) for _ in range(3))
    ours, masked = (way(batch)(q, k, v) for way in (module.by_lengths, module.by_mask))
    for row, length in enumerate(batch.lengths.tolist()):
        alone = F.scaled_dot_product_attention(
            *(t[row, :, :length] for t in (q, k, v)), is_causal=True
        )
        torch.testing.assert_close(ours[row, :, :length], alone)
        torch.testing.assert_close(masked[row, :, :length], alone)


def test_fine_tuning_a_saved_model(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    load("train_gpt").main(
        f"--size tiny --steps 20 --report 100 --device cpu --save {path}".split()
    )
    options = "--batch 4 --longest 100 --steps 3 --device cpu"
    fresh = load("padded_batch").main(options.split())
    tuned = load("padded_batch").main([*options.split(), "--model", str(path)])
    printed = capsys.readouterr().out
    assert "4 sequences of 12 to 100 tokens on cpu" in printed
    assert "4 sequences of 8 to 64 tokens on cpu" in printed  # no longer than its context
    for result in (fresh, tuned):
        assert len(result.losses["lengths"]) == 3
        assert result.losses["lengths"] == pytest.approx(result.losses["mask"], abs=1e-4)
    assert tuned.losses["mask"][0] < fresh.losses["mask"][0] - 0.3
    expected = [*fresh.milliseconds.values(), *tuned.milliseconds.values()]
    assert numbers(r"(\S+) ms a step", printed) == pytest.approx(expected, abs=0.006)


# ------------------------------------------------------------------------------ long context


def test_long_context(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--length 96 --window 16 --steps 2 --heads 1 --layers 1 --device cpu"
    results = load("long_context").main([*options.split(), "--attention", "full", "window", "mask"])
    assert results["window"].loss == pytest.approx(results["mask"].loss, abs=1e-5)
    assert results["window"].loss != pytest.approx(results["full"].loss, abs=1e-5)
    assert all(result.peak_bytes is None for result in results.values())
    printed = capsys.readouterr().out
    expected = [result.milliseconds for result in results.values()]
    assert numbers(r"(\S+) ms a step", printed) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("way", ["window", "flex", "mask"])
def test_windows_see_the_same_keys(load: Load, way: str) -> None:
    attend = load("long_context").WAYS[way](40, 7, torch.device("cpu"))
    at = torch.arange(40)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < 7)
    if way == "flex":  # its kernel would be compiled
        assert torch.equal(attend.keywords["block_mask"].mask_mod(0, 0, at[:, None], at), seen)
        return
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(attend(q, k, v), expected)


def test_flex_attention_on_a_cpu_is_refused(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("long_context").main(["--attention", "flex", "--device", "cpu"])
    assert ended.value.code == 2
    assert "FlexAttention has no backward on a CPU" in capsys.readouterr().err


# -------------------------------------------------------------------------------- container


def test_the_recording_holds_the_calls_of_the_server(load: Load) -> None:
    device = devices.described("h200")
    expected = []
    for _, tensors, options in load("serve").calls("meta"):
        given = Options(is_causal=options.get("is_causal", False), enable_gqa=True)
        lengths = options.get("seq_lens_kv")
        if lengths is None:
            expected += precompile.specs_of(*tensors, None, given, device, gradient=False)
        else:
            call = Given(*tensors, lengths_kv=lengths)
            expected += precompile.extended_specs(call, given, Terms(), device, gradient=False)
    assert recording.read([CONTAINER / "calls.jsonl"]) == expected


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plans that the Dockerfile's command compiles."""
    folder = tmp_path_factory.mktemp("plans")
    done = support.run(*_in_dockerfile("cudnn-mha compile", folder))
    assert done.exit_code == 0, done.output
    return folder


def _in_dockerfile(command: str, plans: Path) -> list[str]:
    """The arguments of the one command of the Dockerfile that starts so, for this machine."""
    text = (CONTAINER / "Dockerfile").read_text()
    (gpu,) = re.findall(r"^ARG GPU=(\S+)$", text, re.MULTILINE)
    (line,) = re.findall(rf"^RUN .*{re.escape(command)} (.*)$", text, re.MULTILINE)
    places = {"$GPU": gpu, "/plans": str(plans), "calls.jsonl": str(CONTAINER / "calls.jsonl")}
    return [*(command.split()[1:]), *(places.get(word, word) for word in shlex.split(line))]


@pytest.fixture
def only_plans_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes this process find the plans of a folder and no others, and compile none."""

    def set_up(folder: Path) -> None:
        monkeypatch.setenv(config.PLANS, str(folder))
        monkeypatch.setenv(config.BUILD, "never")
        config.reload()
        cudnn_mha.cache_clear()

    yield set_up
    monkeypatch.undo()
    config.reload()
    cudnn_mha.cache_clear()


def test_the_image_has_a_plan_for_each_call(
    load: Load,
    plans: Path,
    only_plans_of: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, *arguments = _in_dockerfile("python serve.py", plans)
    only_plans_of(plans)
    assert script == "serve.py"
    assert load("serve").main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "prompt of 256: its plan is there",
        "prompt of 512: its plan is there",
        "next tokens: its plan is there",
    ]
    info = cudnn_mha.cache_info()
    assert (info.loads, info.builds) == (3, 0)


def test_a_missing_plan_fails_the_build(
    load: Load,
    tmp_path: Path,
    plans: Path,
    only_plans_of: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    incomplete = tmp_path / "plans"
    shutil.copytree(plans, incomplete)
    next(incomplete.glob("??/*.plan")).unlink()
    only_plans_of(incomplete)
    assert load("serve").main(["--check", "h200"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("its plan is there") == 2
    assert printed.count("NO PLAN") == printed.count("[not_compiled]") == 1


def test_what_the_dockerfile_copies_is_there() -> None:
    root = EXAMPLES.parent
    text = (CONTAINER / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert "cudnn_mha" in names
    assert all((root / name).exists() for name in names)


def test_without_docker(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps, which the tests above run: what is started with which variables."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> None:
        assert check and command[0] == sys.executable
        started.append((command[1:], env))

    monkeypatch.setattr(subprocess, "run", run)
    load("without_docker").main(["--gpu", "b200", "--plans", str(tmp_path)])
    (compiled, _), (checked, of_check), (served, of_serve) = started
    calls, serve = str(CONTAINER / "calls.jsonl"), str(CONTAINER / "serve.py")
    assert compiled[:3] == ["-m", "cudnn_mha", "compile"]
    assert compiled[3:] == ["--gpu", "b200", "--from", calls, "--out", str(tmp_path)]
    assert (checked, served) == ([serve, "--check", "b200"], [serve])
    assert of_check["TORCH_CUDNN_MHA_PLANS"] == of_serve["TORCH_CUDNN_MHA_PLANS"] == str(tmp_path)
    assert of_check["TORCH_CUDNN_MHA_BUILD"] == "never"
    assert "TORCH_CUDNN_MHA_BUILD" not in of_serve
    assert capsys.readouterr().out.count("$ ") == 3


def test_the_server_on_a_cpu(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    serve: Any = load("serve")
    serve.PROMPTS, serve.CACHE, serve.BATCH = (8,), 16, 2
    with torch.inference_mode():
        serve.serve("cpu")
    printed = capsys.readouterr().out
    assert re.search(r"^prompt of 8: at first \S+ ms, then \S+ ms$", printed, re.MULTILINE)
    assert re.search(r"^plans loaded: \d+, compiled here: \d+$", printed, re.MULTILINE)


# -------------------------------------------------------------------------------------- GPU
# In processes of their own: what compilers warn of is no error there.


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_training_on_a_gpu(compiled: bool) -> None:
    options = "--attention both --size tiny --steps 60 --report 60 --device cuda"
    script = str(EXAMPLES / "train_gpt.py")
    printed = python(script, *options.split(), *["--compile"] * compiled, timeout=400)
    ours, pytorchs = numbers(r": loss (\S+),", printed)
    assert ours == pytest.approx(pytorchs, abs=0.05)
    assert ours < 2.9
    ours, pytorchs = numbers(r"validation (\S+),", printed)
    assert ours == pytest.approx(pytorchs, abs=0.05)


@pytest.mark.gpu
def test_training_on_several_gpus() -> None:
    count = min(2, torch.cuda.device_count())
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    options = "--size tiny --steps 60 --report 60 --device cuda"
    printed = python(*torchrun, str(EXAMPLES / "train_gpt.py"), *options.split())
    assert f"cudnn attention on {count} x cuda" in printed
    (loss,) = numbers(r": loss (\S+),", printed)
    assert loss < 2.9


@pytest.mark.gpu
def test_padded_batches_on_a_gpu() -> None:
    options = "--batch 8 --longest 512 --steps 6 --device cuda"
    printed = python(str(EXAMPLES / "padded_batch.py"), *options.split())
    lengths, mask = (numbers(rf"{way} (\d\.\d+)", printed) for way in ("lengths", "mask"))
    assert len(lengths) == 6
    assert lengths == pytest.approx(mask, abs=0.03)


@pytest.mark.gpu
def test_long_context_on_a_gpu() -> None:
    options = "--length 4096 --window 256 --steps 3 --device cuda --attention full window flex mask"
    printed = python(str(EXAMPLES / "long_context.py"), *options.split(), timeout=400)
    _, window, flex, mask = numbers(r": loss (\S+),", printed)
    assert [flex, mask] == pytest.approx([window, window], abs=0.02)
    assert len(numbers(r", (\S+) GiB at most", printed)) == 4


@pytest.mark.gpu
def test_the_server_compiles_nothing(tmp_path: Path) -> None:
    if devices.cuda(0).name != devices.described("h200").name:
        pytest.skip("the plans of the example are for an H200")
    recorded, plans = tmp_path / "calls.jsonl", tmp_path / "plans"
    compiling = python(str(CONTAINER / "serve.py"), TORCH_CUDNN_MHA_RECORD=str(recorded))
    assert "plans loaded: 0, compiled here: 3" in compiling
    assert recording.read([recorded]) == recording.read([CONTAINER / "calls.jsonl"])
    printed = python(str(CONTAINER / "without_docker.py"), "--plans", str(plans), timeout=300)
    assert "plans loaded: 3, compiled here: 0" in printed
