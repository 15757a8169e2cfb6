"""The commands that make plans ahead of time and look after those on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cudnn_mha import (
    cache,
    checks,
    cli,
    cli_plans,
    config,
    devices,
    explain,
    precompile,
    recording,
    runtime,
)
from cudnn_mha.cache import plan_key
from cudnn_mha.checks import Reason
from cudnn_mha.config import CACHE_DIR, WORKSPACE_LIMIT
from cudnn_mha.errors import CudnnUnavailableError
from cudnn_mha.precompile import Outcome
from cudnn_mha.sequences import ragged
from cudnn_mha.spec import AttentionSpec, contiguous_stride
from cudnn_mha.store import FORMAT, Entry, Store
from tests.support import BACKWARD, BSHD, ESCAPE, attention, parsed, run, tensor

H200 = devices.described("h200")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE_LIMIT, raising=False)
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


def words(text: str) -> str:
    """A message as one line, whatever its width was."""
    return " ".join(text.split())


# ---------------------------------------------------------------------------- compile, for real


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder that the command filled, and what it said."""
    folder = tmp_path_factory.mktemp("compiled")
    recording = folder / "calls.jsonl"
    recording.write_text(json.dumps(attention(lengths=(8, 8)).to_dict()) + "\n")
    result = run(
        *("compile", "--gpu", "h200", "--gpu", "A10", "--from", str(recording)),
        *("--q", "2,4,200,192", "--causal", "--backward", "--jobs", "1"),
        *("--out", str(folder / "plans"), "--json"),
    )
    return folder / "plans", result


def test_compiling_fills_a_folder_and_tells_of_every_graph(compiled: tuple[Path, Result]) -> None:
    folder, result = compiled
    assert result.exit_code == 0
    found = parsed(result)
    assert found["folder"] == str(folder)
    outcomes = found["outcomes"]
    assert [(o["gpu"], o["spec"].split()[0], o["engine"] is None) for o in outcomes] == [
        ("h200", "forward", False),
        ("h200", "forward", False),
        ("h200", "backward", False),
        ("a10", "forward", False),
        ("a10", "forward", False),
        ("a10", "backward", True),
    ]
    assert outcomes[-1]["reasons"][0].endswith("[head_dim]")
    tallies = [(t["gpu"], t["plans"], t["new"], t["refusals"]) for t in found["gpus"]]
    assert tallies == [("h200", 3, 3, 0), ("a10", 2, 2, 1)]
    sizes = [facts.st_size for _, facts in Store(folder).files()]
    assert len(sizes) == 5
    assert sum(tally["bytes"] for tally in found["gpus"]) == sum(sizes)
    for tally in found["gpus"]:
        mine = [o["seconds"] for o in outcomes if o["gpu"] == tally["gpu"]]
        assert tally["seconds"] == pytest.approx(sum(mine))


def test_a_call_finds_what_the_command_compiled(
    compiled: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.PLANS, str(compiled[0]))
    config.reload()
    cache.plans.cache_clear()
    q = (2, 4, 200, 192)
    explanation = explain(q, q, q, is_causal=True, requires_grad=True, gpu="h200")
    assert explanation.served
    info = cache.cache_info()
    assert (info.builds, info.loads) == (0, 2)
    cache.plans.cache_clear()


FURTHER = {
    "ragged": dataclasses.replace(
        ragged(attention(lengths=(200, 150), order=BSHD, lse=True), 256, 256), sinks=True
    ),
    "window": attention(BACKWARD, lengths=(200, 72), left=64, causal=True, bottom_right=True),
    "softcap": attention(softcap=20.0, right=16, left=8),
    "slopes": attention(slopes=True, causal=True),
    "paged": attention(
        lengths=(4, 16), key=tensor((40, 4, 16, 64)), value=tensor((40, 4, 16, 64)),
        page_table=tensor((2, 1, 5, 1), "int32"), causal=True, bottom_right=True,
    ),
}  # fmt: skip
FURTHER["paged"] = dataclasses.replace(FURTHER["paged"], lengths=True)


def test_recorded_graphs_of_every_kind_are_compiled_listed_and_shown(tmp_path: Path) -> None:
    with recording.record(tmp_path / "calls.jsonl"):
        for spec in FURTHER.values():
            recording.note(spec)
    plans = str(tmp_path / "plans")
    found = parsed(result := run("compile", "--gpu", "h200", "--from", str(tmp_path), "--out",
                                 plans, "--jobs", "1", "--json"))  # fmt: skip
    assert result.exit_code == 0
    assert [outcome["reasons"] for outcome in found["outcomes"]] == [[]] * len(FURTHER)
    wanted = {str(checks.remedied(spec, H200)) for spec in FURTHER.values()}
    listed = parsed(run("cache", "list", "--dir", plans, "--json"))["entries"]
    assert {entry["graph"] for entry in listed} == wanted
    for entry in listed:
        shown = parsed(run("cache", "show", entry["key"], "--dir", plans, "--json"))
        assert shown["problem"] is None
        assert str(AttentionSpec.from_dict(shown["spec"])) == entry["graph"]
        text = run("cache", "show", entry["key"], "--dir", plans).stdout
        assert entry["graph"] in words(text)
    assert run("cache", "verify", "--dir", plans).exit_code == 0
    table = words(run("cache", "list", "--dir", plans).stdout)
    for part in ("ragged", "softcap=20", "slopes", "left=64", "page_table=2x1x5x1:int32"):
        assert part in table


# ------------------------------------------------------------------------ compile, what it is asked


class Compiler:
    """Stands in for `compile_ahead`: keeps what it is asked, answers with an outcome for each."""

    def __init__(self) -> None:
        self.specs: list[AttentionSpec] = []
        self.gpus: Sequence[str] = ()
        self.named: dict[str, Any] = {}
        self.refused: set[str] = set()
        self.seconds = 0.25

    def __call__(
        self, specs: list[AttentionSpec], gpus: Sequence[str], folder: Path, **named: Any
    ) -> list[Outcome]:
        self.specs, self.gpus = specs, gpus
        progress = named.pop("progress")
        self.named = named | {"folder": folder}
        outcomes = []
        for gpu in gpus:
            for spec in specs:
                outcome = Outcome(gpu, str(spec), "eng1", 64, 2048, self.seconds)
                if gpu in self.refused:
                    outcome = Outcome(gpu, str(spec), reasons=("too wide [head_dim]", "too odd"))
                outcomes.append(outcome)
                progress(outcome)
        return outcomes

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        return [(s.query.shape, s.key.shape, s.value.shape) for s in self.specs]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(precompile, "compile_ahead", made)
    return made


def compile_(*arguments: str) -> Result:
    return run("compile", "--gpu", "h200", "--out", "plans", *arguments)


def test_options_reach_the_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE_LIMIT, "3kB")
    config.reload()
    result = run("compile", "--gpu", "b200", "--gpu", "h200", "--gpu", "b200", "--out", "x/y",
                 "--q", "2,4,200,64")  # fmt: skip
    assert result.exit_code == 0
    assert compiler.gpus == ("b200", "h200")
    assert compiler.named == {"folder": Path("x/y"), "workspace_limit": 3000, "jobs": None}
    compile_("--q", "2,4,200,64", "--jobs", "3", "--workspace-limit", "64MiB")
    assert compiler.named == {"folder": Path("plans"), "workspace_limit": 2**26, "jobs": 3}
    compile_("--q", "2,4,200,64", "--workspace-limit", "0")
    assert compiler.named["workspace_limit"] == 0


def test_the_options_of_check_describe_the_calls(compiler: Compiler) -> None:
    compile_("--q", "2,8,200,64", "--kv", "2,2,333,64", "--v", "2,4,333,128", "--dtype", "fp16",
             "--mask", "1,HQ,SQ,SKV", "--mask-dtype", "fp32", "--dropout", "0.25", "--scale", "2",
             "--backward", "--deterministic")  # fmt: skip
    forward, backward = compiler.specs
    assert (forward.query.dtype, forward.scale, forward.dropout_p) == ("float16", 2.0, 0.25)
    assert (forward.lse, forward.causal, forward.deterministic) == (True, False, False)
    assert forward.bias is not None
    assert (forward.bias.shape, forward.bias.dtype) == ((1, 8, 200, 333), "float32")
    assert (backward.backward, backward.deterministic) == (True, True)
    assert compiler.shapes[0] == ((2, 8, 200, 64), (2, 2, 333, 64), (2, 4, 333, 128))

    compile_("--q", "2,8,200,64", "--causal")
    assert [(s.causal, s.lse, s.query.dtype) for s in compiler.specs] == [(True, False, "bfloat16")]
    compile_("--q", "2,8,200,64", "--lse", "--layout", "bshd")
    (spec,) = compiler.specs
    assert spec.lse
    assert spec.query.stride == spec.output.stride == (200 * 8 * 64, 64, 8 * 64, 1)


def test_the_arguments_that_pytorch_does_not_have(compiler: Compiler) -> None:
    compile_("--q", "2,8,200/250,64", "--lengths", "--causal", "--window", "64,0", "--backward",
             "--layout", "bshd")  # fmt: skip
    forward, backward = compiler.specs  # of both lengths
    assert [s.query.shape for s in compiler.specs] == [(2, 8, 256, 64)] * 2
    for spec in compiler.specs:
        assert (spec.lengths, spec.ragged, spec.left, spec.causal) == (True, True, 64, True)
    assert (forward.lse, backward.backward) == (True, True)

    compile_("--q", "2,8,300,64", "--kv", "2,8,200,64", "--causal", "--sinks", "--backward",
             "--alignment", "bottom_right")  # fmt: skip
    assert [(s.bottom_right, s.sinks, s.grad_sinks, s.padding) for s in compiler.specs] == [
        (True, True, False, False),
        (True, True, True, False),
    ]
    compile_("--q", "2,8,128,64", "--softcap", "3", "--slopes")
    assert [(s.softcap, s.slopes, s.alibi) for s in compiler.specs] == [(3.0, True, False)]
    compile_("--q", "2,8,128,64", "--alibi", "--causal")
    assert [(s.softcap, s.slopes, s.alibi) for s in compiler.specs] == [(0.0, False, True)]


def test_how_lengths_are_told_is_up_to_each_gpu(compiler: Compiler) -> None:
    compile_("--gpu", "a10", "--q", "2,8,200,64", "--lengths")
    assert [(s.seq_q, s.ragged) for s in compiler.specs] == [(256, True), (200, False)]


@pytest.mark.parametrize(
    ("arguments", "shapes"),
    [
        (("--q", "1/2,4,8,64"), [((b, 4, 8, 64),) * 3 for b in (1, 2)]),
        (("--q", "1,4,128:512:128,64"), [((1, 4, s, 64),) * 3 for s in (128, 256, 384, 512)]),
        (("--q", "1,4,1/128:300:128,64"), [((1, 4, s, 64),) * 3 for s in (1, 128, 256)]),
        (("--q", "1:3,4,8,64"), [((b, 4, 8, 64),) * 3 for b in (1, 2, 3)]),
        (("--q", "4,8/16, 64/128"), [((1, 4, s, d),) * 3 for s in (8, 16) for d in (64, 128)]),
        (
            ("--q", "1/2,8,16/24,64", "--kv", "B,2,sq,D"),
            [((b, 8, s, 64), (b, 2, s, 64), (b, 2, s, 64)) for b in (1, 2) for s in (16, 24)],
        ),
        (
            ("--q", "2,8,1,64", "--kv", "B,2/4,16/24,D", "--v", "B,HKV,SKV,32"),
            [((2, 8, 1, 64), (2, h, s, 64), (2, h, s, 32)) for h in (2, 4) for s in (16, 24)],
        ),
        (
            ("--q", "2,4,8,64", "--v", "B,HKV,SKV,32/64"),
            [((2, 4, 8, 64), (2, 4, 8, 64), (2, 4, 8, d)) for d in (32, 64)],
        ),
    ],
)
def test_numbers_may_be_several_ranges_and_names(
    compiler: Compiler, arguments: tuple[str, ...], shapes: list[Any]
) -> None:
    assert compile_(*arguments).exit_code == 0
    assert compiler.shapes == shapes


def test_what_is_the_same_graph_is_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    """A head dimension of 60 is padded to 64."""
    compile_("--q", "1,4,8,64/64", "--scale", "1")
    compile_("--q", "1,4,8,60/64", "--scale", "1")
    assert compiler.shapes == [((1, 4, 8, 64),) * 3]
    recording = tmp_path / "calls.jsonl"
    recording.write_text("\n".join(json.dumps(spec.to_dict()) for spec in compiler.specs))
    other = attention()
    (tmp_path / "more.jsonl").write_text(json.dumps(other.to_dict()))
    compile_(
        "--q", "1,4,8,60/72", "--scale", "1", "--from", str(recording), "--from", str(tmp_path)
    )
    assert [spec.dim_qk for spec in compiler.specs] == [64, 64, 72]
    assert compiler.specs[1] == other


def test_parts_are_those_of_each_gpu(compiler: Compiler) -> None:
    compile_("--q", "65536,1,8,64")
    assert [spec.batch for spec in compiler.specs] == [32768]


def test_the_summary_in_words(compiler: Compiler) -> None:
    compiler.refused = {"a10"}
    result = run("compile", "--gpu", "h200", "--gpu", "a10", "--out", "plans",
                 "--q", "2,4,8/16,64")  # fmt: skip
    assert result.exit_code == 0
    assert ESCAPE not in result.stdout
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert ["h200", "2", "2", "0", "4.0 KiB", "0.5"] in cells
    assert ["a10", "0", "0", "2", "0 B", "0.0"] in cells
    at = lines.index(
        "refused a10: forward query=2x4x8x64:bfloat16 key=2x4x8x64:bfloat16 "
        "value=2x4x8x64:bfloat16 scale=0.125"
    )
    assert lines[at + 1 : at + 3] == ["  reason: too wide [head_dim]", "  reason: too odd"]
    assert sum(line.startswith("refused") for line in lines) == 2


def test_plans_that_were_there_are_not_new(compiler: Compiler) -> None:
    compiler.seconds = 0.0
    (tally,) = parsed(compile_("--q", "2,4,8,64", "--json"))["gpus"]
    assert tally == {
        "gpu": "h200",
        "plans": 1,
        "new": 0,
        "refusals": 0,
        "bytes": 2048,
        "seconds": 0.0,
    }


def test_no_plan_at_all_is_a_failure(compiler: Compiler, tmp_path: Path) -> None:
    compiler.refused = {"h200"}
    result = compile_("--q", "2,4,8,64")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "no plan was compiled"
    (tmp_path / "calls.jsonl").touch()
    found = parsed(result := compile_("--from", str(tmp_path), "--json"))
    assert result.exit_code == 1
    assert found["outcomes"] == []
    assert [tally["plans"] for tally in found["gpus"]] == [0]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("plans can be written by other users"), "can be written by other users"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (BrokenProcessPool("A process was terminated abruptly."), "abruptly. Perhaps memory ran"),
    ],
)
def test_failures_are_messages(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(precompile, "compile_ahead", fail)
    result = compile_("--q", "2,4,8,64", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in words(result.stderr)


def test_without_cudnn_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CudnnUnavailableError("cuDNN itself cannot be loaded")

    monkeypatch.setattr(runtime, "library", missing)
    result = compile_("--q", "2,4,8,64")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cuDNN itself cannot be loaded" in result.stderr


Q = ("--q", "2,4,8,64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "calls must come from --from, from --q, or from both"),
        (("--causal",), "--causal describes a call only together with --q"),
        (("--kv", "2,4,8,64"), "--kv describes a call only together with --q"),
        (("--dtype", "bf16"), "--dtype describes a call only together with --q"),
        (("--window", "1,1"), "--window describes a call only together with --q"),
        (("--no-gqa",), "--gqa describes a call only together with --q"),
        (("--from", "nothing.jsonl"), "'--from': Path 'nothing.jsonl' does not exist"),
        (("--q", "2,4,8,x"), "'--q': 'x' is no whole number, nor several such as 1/2/4, nor a"),
        (("--q", "2,4,8,"), "'--q': '' is no whole number"),
        (("--q", "2,4,-8,64"), "'-8' is no whole number"),
        (("--q", "2,4,8/,64"), "'8/' is no whole number"),
        (("--q", "2,4,1:2:3:4,64"), "'1:2:3:4' is no whole number"),
        (("--q", "2,4,256:128,64"), "the range '256:128' is empty"),
        (("--q", "2,4,1:8:0,64"), "the range '1:8:0' is empty"),
        (("--q", "8,64"), "'8,64' must have 4 numbers B,H,S,D or 3 H,S,D"),
        (("--q", "2,4,1:1000000000000,64"), "'1:1000000000000' are more than 100,000 numbers"),
        (("--q", "1:400,1:400,8,64"), "these are 160,000 calls, more than 100,000"),
        (("--q", "2,4,SKV,64"), "SKV is used before any shape gives it"),
        (("--q", "4,8,64", "--kv", "B,8,64"), "B is used before any shape gives it"),
        (("--q", "1,4,128,99999999999999999"), "has more elements than any GPU's memory"),
        ((*Q, "--kv", "2,4,8,32"), "query and key must have the same head dimension"),
        ((*Q, "--kv", "2,3/4,8,64"), "the heads of key must divide those of query, got 3 and 4"),
        ((*Q, "--mask", "2,1,1,5"), "attn_mask must broadcast to (2, 4, 8, 8)"),
        ((*Q, "--mask", "1,1,9999999999,9999999999"), "has more elements than any GPU's memory"),
        (
            ("--q", "1,1,99999999999,8", "--mask", "SQ,1"),
            "attn_mask would be of shape (99999999999, 99999999999)",
        ),
        ((*Q, "--mask", "1", "--causal"), "--mask and --causal exclude each other"),
        ((*Q, "--dropout", "1.5"), "dropout_p must be in [0, 1], got 1.5"),
        ((*Q, "--workspace-limit", "much"), "workspace_limit must be a number of bytes or"),
        ((*Q, "--window", "1"), "'1' is no window such as 1023,0 or -1,128"),
        ((*Q, "--softcap", "inf"), "softcap must be positive"),
        (("--q", "2,4,0,64", "--lengths"), "a dimension is 0; there is nothing for cuDNN"),
        ((*Q, "--jobs", "0"), "'--jobs': 0 is not in the range x>=1"),
        ((*Q, "--gpu", "h300"), "'h300' is not one of 'a10',"),
    ],
)
def test_usage_errors(compiler: Compiler, arguments: tuple[str, ...], message: str) -> None:
    result = compile_(*arguments, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in words(result.stderr)
    assert compiler.gpus == ()


def test_a_line_that_is_no_call_is_named(compiler: Compiler, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text("{}\n")
    result = compile_("--from", str(path))
    assert result.exit_code == 2
    assert f"{path}, line 1: this is no attention spec" in words(result.stderr)


def test_where_and_for_what_must_be_said() -> None:
    for arguments, option in (
        (("--gpu", "h200", *Q), "--out"),
        (("--out", "plans", *Q), "--gpu"),
    ):
        result = run("compile", *arguments)
        assert result.exit_code == 2
        assert f"Missing option '{option}'" in result.stderr


def test_a_terminal_shows_the_progress(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    result = compile_("--q", "2,4,8/16/24,64", "--json")
    assert len(json.loads(result.stdout)["outcomes"]) == 3
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stderr)
    assert "h200" in text
    assert "3/3" in text


# ------------------------------------------------------------------------------------------ cache

KEYS = [
    plan_key(attention(causal=True), H200, None),
    plan_key(attention(BACKWARD, dims=(512, 512)), devices.described("b200"), 2**20),
    plan_key(attention(lengths=(1, 777)), H200, None)._replace(cudnn_version=91900),
]
ENTRIES = [
    Entry(KEYS[0].to_dict(), "eng9_k24=1", 0, None, b"\0" * 5000),
    Entry(KEYS[1].to_dict(), refusal=Reason("cudnn", "cuDNN: no engine")),
    Entry(KEYS[2].to_dict(), "eng3", 4096, None, b"\1" * 100),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A folder in which the last of the entries was used last."""
    made = Store(tmp_path / "plans")
    for number, entry in enumerate(ENTRIES):
        made.save(entry)
        then = time.time() - 3600 * (10 - number)
        os.utime(made.path(entry.key), (then, then))
    return made


def name(store: Store, number: int) -> str:
    return store.path(ENTRIES[number].key).stem


def in_(store: Store) -> tuple[str, str]:
    return "--dir", str(store)


def test_list(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parsed(result := run("cache", "list", *in_(store), "--json"))
    assert result.exit_code == 0
    assert found["folder"] == str(store)
    assert found["bytes"] == sum(len(entry.to_bytes()) for entry in ENTRIES)
    assert [entry["key"] for entry in found["entries"]] == [name(store, n) for n in (2, 1, 0)]
    newest, refusal, _ = found["entries"]
    assert found["problem"] is None
    assert newest | {"last_used": ""} == {
        "key": name(store, 2),
        "file": str(store.path(ENTRIES[2].key)),
        "problem": None,
        "bytes": len(ENTRIES[2].to_bytes()),
        "last_used": "",
        "gpu_name": "NVIDIA H200",
        "direction": "forward",
        "graph": str(KEYS[2].spec),
        "engine": "eng3",
        "workspace": 4096,
        "refusal": None,
    }
    assert (refusal["engine"], refusal["refusal"]) == (None, "cuDNN: no engine [cudnn]")
    assert (refusal["gpu_name"], refusal["direction"]) == ("NVIDIA B200", "backward")
    assert newest["last_used"].endswith("+00:00")

    text = run("cache", "list", *in_(store)).stdout
    assert ESCAPE not in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    firsts = [row for row in rows if row and re.fullmatch("[0-9a-f]{12}", row[0])]
    assert [row[0] for row in firsts] == [name(store, n)[:12] for n in (2, 1, 0)]
    assert [row[1] for row in firsts] == ["NVIDIA H200", "NVIDIA B200", "NVIDIA H200"]
    assert [row[2] for row in firsts] == ["forward", "backward", "forward"]
    assert [row[4] for row in firsts] == ["eng3", "cuDNN: no engine [cudnn]", "eng9_k24=1"]
    assert firsts[2][5] == f"{len(ENTRIES[0].to_bytes()) / 1024:.1f} KiB"
    then = time.localtime(time.time() - 3600 * 8)
    assert firsts[0][6][:13] == time.strftime("%Y-%m-%d %H", then)
    assert text.splitlines()[-1].startswith(f"{store}: 3 files, ")
    monkeypatch.setenv("COLUMNS", "60")
    assert run("cache", "list", *in_(store)).stdout == text  # a file has no width


def test_list_shows_what_is_of_no_use(store: Store) -> None:
    store.path(ENTRIES[1].key).write_bytes(b"garbage")
    found = parsed(run("cache", "list", *in_(store), "--json"))["entries"]
    assert found[0]["problem"] == "it is no plan of cudnn_mha"
    assert "graph" not in found[0]
    text = words(run("cache", "list", *in_(store)).stdout.replace("│", " "))
    assert "unusable: it is no plan of cudnn_mha" in text
    assert len(store.files()) == 3  # looking removes nothing


def on_a_terminal(width: int, *arguments: str) -> str:
    """What the command shows on a terminal of that width."""
    reader, writer = os.openpty()
    command = subprocess.Popen(
        [sys.executable, "-m", "cudnn_mha", *arguments],
        stdout=writer,
        env={**os.environ, "COLUMNS": str(width), "TERM": "xterm"},
    )
    os.close(writer)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal reads
        while part := os.read(reader, 4096):
            shown += part
    os.close(reader)
    assert command.wait() == 0
    return re.sub(ESCAPE + r"\[[0-9;]*m", "", shown.decode())


@pytest.mark.parametrize("width", [20, 60, 99, 100])
def test_list_fits_a_terminal(store: Store, width: int) -> None:
    store.path(ENTRIES[1].key).write_bytes(b"garbage")
    shown = on_a_terminal(width, "cache", "list", *in_(store))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    assert shown.count("│") == 0 if width < 100 else shown.count("│") > 0
    if width == 60:
        cells = [line.strip().split(maxsplit=1) for line in lines]
        assert ["key", name(store, 2)[:12]] in cells
        assert ["GPU", "NVIDIA H200"] in cells
        assert "engine or refusal eng3" in [" ".join(line.split()) for line in lines]
    assert f"{store}:3files," in "".join(shown.split())  # nothing is cut off


@pytest.mark.parametrize("command", ["list", "verify", "clear"])
def test_an_empty_folder_and_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "none"))
    config.reload()
    for where in ((), ("--dir", str(tmp_path))):
        result = run("cache", command, *where)
        assert result.exit_code == 0
        assert "0 files, 0 B" in result.stdout
        assert run("cache", command, *where, "--json").exit_code == 0
    assert not (tmp_path / "none").exists()
    result = run("cache", command, "--dir", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


@pytest.mark.parametrize("command", ["list", "verify", "clear", "show abc"])
def test_off_is_a_clear_message(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv(CACHE_DIR, "off")
    config.reload()
    result = run("cache", *command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{CACHE_DIR}=off keeps no plans on disk; name a folder with --dir" in words(
        result.stderr
    )


def test_the_folder_in_force_is_the_default(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR, str(store))
    config.reload()
    assert parsed(run("cache", "list", "--json"))["folder"] == str(store)
    monkeypatch.setenv(config.BUILD, "later")
    config.settings.cache_clear()
    result = run("cache", "list")
    assert result.exit_code == 2
    assert f"{config.BUILD} must be one of now" in words(result.stderr)


def test_show(store: Store) -> None:
    found = parsed(result := run("cache", "show", name(store, 1)[:5], *in_(store), "--json"))
    assert result.exit_code == 0
    assert found["spec"] == KEYS[1].spec.to_dict()
    assert found["gpu"] == {"name": "NVIDIA B200", "sm": 100, "multiprocessors": 148}
    assert (found["workspace_limit"], found["refusal"]) == (2**20, "cuDNN: no engine [cudnn]")
    assert (found["plan_bytes"], found["problem"]) == (0, None)
    (listed,) = (
        entry
        for entry in parsed(run("cache", "list", *in_(store), "--json"))["entries"]
        if entry["key"] == name(store, 1)
    )
    assert listed == {field: found[field] for field in listed}  # a name means one thing
    assert found["cudnn"] == config.version_text(runtime.cudnn_version())
    assert (found["frontend"], found["format"]) == (runtime.frontend_version(), FORMAT)

    text = run("cache", "show", name(store, 0).upper(), *in_(store)).stdout
    shown = dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1)
    assert shown["key"] == name(store, 0)
    assert shown["engine"] == "eng9_k24=1"
    assert shown["gpu.multiprocessors"] == "132"
    assert shown["spec.query.shape"] == "2, 4, 128, 64"
    stride = contiguous_stride((2, 4, 128, 64))
    assert shown["spec.query.stride"] == ", ".join(map(str, stride))
    assert shown["spec.causal"] == "True"
    assert shown["plan_bytes"] == "5000"
    assert "refusal" not in shown


def test_show_needs_one_key(store: Store) -> None:
    result = run("cache", "show", "zz", *in_(store))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{store} has no plan whose key begins with zz" in words(result.stderr)
    result = run("cache", "show", "", *in_(store))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "3 keys begin with" in result.stderr
    assert all(name(store, number)[:12] in result.stderr for number in range(3))


def test_show_tells_what_is_wrong(store: Store) -> None:
    store.path(ENTRIES[0].key).write_bytes(b"garbage")
    result = run("cache", "show", name(store, 0), *in_(store))
    assert result.exit_code == 1
    assert re.search(r"^problem +it is no plan of cudnn_mha$", result.stdout, re.MULTILINE)


def test_verify(store: Store) -> None:
    result = run("cache", "verify", *in_(store))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].startswith(f"{store}: 3 files, ")
    assert result.stdout.splitlines()[1] == "all sound"
    found = parsed(run("cache", "verify", *in_(store), "--json"))
    assert (found["files"], found["problems"]) == (3, [])

    path = store.path(ENTRIES[0].key)
    path.write_bytes(path.read_bytes()[:-1])
    store.path(ENTRIES[2].key).chmod(0o666)
    result = run("cache", "verify", *in_(store))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert f"wrong {path}: its checksum does not match: it is truncated or corrupted" in lines
    writable = store.path(ENTRIES[2].key)
    assert lines[0].startswith(f"wrong {writable}: {writable} can be written by other users")
    assert lines[-1] == "2 files of no use"
    found = parsed(result := run("cache", "verify", *in_(store), "--json"))
    assert result.exit_code == 1
    assert [problem["file"] for problem in found["problems"]] == [str(writable), str(path)]
    assert len(store.files()) == 3


def test_the_examples_of_show_and_list_name_what_there_is(store: Store) -> None:
    found = parsed(run("cache", "show", name(store, 2), *in_(store), "--json"))
    assert found["workspace"] == 4096
    assert re.findall(r"jq (\S+)", run("cache", "show", "--help").stdout) == [".workspace"]
    listed = parsed(run("cache", "list", *in_(store), "--json"))["entries"]
    assert [e["graph"] for e in listed if e["refusal"]] == [str(KEYS[1].spec)]
    assert "select(.refusal) | .graph'" in words(run("cache", "list", "--help").stdout)


def test_a_folder_of_no_use_is_not_sound(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run("cache", "verify", "--dir", str(empty))
    assert result.exit_code == 0
    assert result.stdout == f"{empty}: 0 files, 0 B\nthere is no plan in it\n"
    found = parsed(run("cache", "verify", "--dir", str(empty), "--json"))
    assert found == {
        "folder": str(empty),
        "problem": None,
        "files": 0,
        "bytes": 0,
        "problems": [],
    }

    empty.chmod(0o775)
    problem = (
        f"{empty} can be written by other users, and a plan is native code; `chmod -R go-w {empty}`"
    )
    result = run("cache", "verify", "--dir", str(empty))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"wrong {problem}",
        f"{empty}: 0 files, 0 B",
        "nothing in this folder can be used",
    ]
    found = parsed(result := run("cache", "verify", "--dir", str(empty), "--json"))
    assert (result.exit_code, found["problem"], found["problems"]) == (1, problem, [])
    result = run("cache", "list", "--dir", str(empty))
    assert result.exit_code == 0
    assert result.stdout == f"unusable {problem}\n{empty}: 0 files, 0 B\n"
    found = parsed(run("cache", "list", "--dir", str(empty), "--json"))
    assert found == {"folder": str(empty), "problem": problem, "bytes": 0, "entries": []}

    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as for a mode of 000
    result = run("cache", "verify", *in_(store))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == f"wrong {store} cannot be read by this user"
    assert result.stdout.splitlines()[-1] == "nothing in this folder can be used"
    assert (
        f"unusable {store} cannot be read by this user"
        in run("cache", "list", *in_(store)).stdout.splitlines()
    )


def test_a_missing_numpy_is_not_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Failed to initialize NumPy: No module named 'numpy' (Triggered internally at x.cpp:84.)"
    inspect, options = Store.inspect, sys.warnoptions[:]

    def noisy(self: Store) -> Any:
        # What processes that are spawned are started with.
        assert sys.warnoptions == [*options, "ignore:Failed to initialize NumPy:UserWarning"]
        warnings.warn(said, UserWarning, stacklevel=1)
        return inspect(self)

    monkeypatch.setattr(Store, "inspect", noisy)
    assert len(parsed(run("cache", "list", *in_(store), "--json"))["entries"]) == 3
    assert sys.warnoptions == options
    said = "another warning"
    with pytest.warns(UserWarning, match="another warning"):
        run("cache", "list", *in_(store))


def test_what_the_command_compiled_is_sound(compiled: tuple[Path, Result]) -> None:
    found = parsed(result := run("cache", "verify", "--dir", str(compiled[0]), "--json"))
    assert (result.exit_code, found["files"], found["problems"]) == (0, 5, [])
    entries = parsed(run("cache", "list", "--dir", str(compiled[0]), "--json"))["entries"]
    outcomes = parsed(compiled[1])["outcomes"]
    assert sorted(entry["graph"] for entry in entries) == sorted(
        outcome["spec"] for outcome in outcomes if outcome["engine"]
    )


def test_clear(store: Store) -> None:
    size = sum(len(entry.to_bytes()) for entry in ENTRIES)
    found = parsed(result := run("cache", "clear", *in_(store), "--yes", "--json"))
    assert result.exit_code == 0
    assert found == {"folder": str(store), "removed": 3, "bytes": size, "left": 0}
    assert store.files() == []
    store.save(ENTRIES[2])
    result = run("cache", "clear", *in_(store), "--yes")
    assert result.stdout == f"{store}: removed 1 file, {len(ENTRIES[2].to_bytes())} B\n"


def test_clear_asks_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("cache", "clear", *in_(store), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nobody can be asked here; give --yes" in result.stderr
    assert len(store.files()) == 3

    monkeypatch.setattr(cli_plans, "_can_ask", lambda: True)
    for answer, code, left in (("n\n", 1, 3), ("", 1, 3), ("y\n", 0, 0)):
        result = CliRunner().invoke(cli.main, ["cache", "clear", *in_(store)], input=answer)
        assert f"Remove 3 files from {store}? [y/N]" in result.stderr
        assert (result.exit_code, len(store.files())) == (code, left)


def test_clear_tells_of_what_cannot_be_removed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, stuck = Path.unlink, store.path(ENTRIES[0].key)

    def refuse(path: Path) -> None:
        if path == stuck:
            raise PermissionError(13, "Permission denied")
        unlink(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    result = run("cache", "clear", *in_(store), "--yes")
    assert result.exit_code == 1
    assert "removed 2 files" in result.stdout
    assert "1 file could not be removed" in result.stdout


def test_looking_after_plans_needs_neither_torch_nor_cudnn(store: Store) -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["cudnn"] = None
from cudnn_mha.cli import main
main()
"""
    for arguments in (
        ("cache", "list", *in_(store)),
        ("cache", "show", name(store, 0), *in_(store)),
        ("cache", "verify", *in_(store)),
        ("cache", "clear", *in_(store), "--yes"),
        ("compile", "--help"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
