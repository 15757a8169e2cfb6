"""Compiling for described GPUs: what a plan says of itself, refusals, the order of attempts."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudnn_mha import cache, config, devices, plan, runtime
from cudnn_mha.cache import Slot
from cudnn_mha.graph_builder import Uid, constants, operands, propose_plans
from cudnn_mha.plan import Plan, Refused, compile_plan, load_plan
from cudnn_mha.sequences import ragged
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.store import Entry, Store
from tests.support import BACKWARD, BSHD, attention, tensor

H200 = devices.described("h200")
BACKWARD_SPEC = attention(BACKWARD, lengths=(256, 256))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Building a plan costs nothing and always works; the indices that were tried."""
    tried: list[int] = []
    kind = type(propose_plans(attention(), H200))
    monkeypatch.setattr(kind, "build_plan_at_index", lambda self, index: tried.append(index))
    monkeypatch.setattr(kind, "get_workspace_size", lambda self: 256)
    return tried


def declining(
    monkeypatch: pytest.MonkeyPatch, tried: list[int], count: int, error: Exception
) -> None:
    """The first ``count`` plans do not build."""
    kind = type(propose_plans(attention(), H200))

    def build(self: Any, index: int) -> None:
        tried.append(index)
        if len(tried) <= count:
            raise error

    monkeypatch.setattr(kind, "build_plan_at_index", build)


def names(spec: AttentionSpec) -> list[str]:
    graph = propose_plans(spec, H200)
    return [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]


@pytest.mark.parametrize(
    ("profile", "spec"),
    [
        ("h200", attention(causal=True, lse=True)),
        ("b200", attention(causal=True, lse=True)),
        ("a100-sxm-80gb", attention(BACKWARD, lengths=(200, 72))),
    ],
)
def test_compiles_for_a_described_gpu(profile: str, spec: AttentionSpec) -> None:
    device = devices.described(profile)
    compiled = compile_plan(spec, device)
    assert (compiled.spec, compiled.device) == (spec, device)
    assert re.fullmatch(r"eng\d+_k\d+=.*", compiled.engine)
    assert (compiled.workspace > 2**16) == spec.backward  # only the backward accumulates


def test_workspace_limit_names_the_least_and_that_suffices() -> None:
    with pytest.raises(Refused) as caught:
        compile_plan(BACKWARD_SPEC, H200, workspace_limit=1)
    reason = caught.value.reason
    assert reason.rule == "workspace_limit"
    found = re.search(
        r"workspace_limit = 1 bytes, the least (\d+); raise the limit", reason.message
    )
    assert found
    least = int(found[1])
    assert least > 2**16
    assert compile_plan(BACKWARD_SPEC, H200, workspace_limit=least).workspace == least
    with pytest.raises(Refused, match=f"the least {least}"):
        compile_plan(BACKWARD_SPEC, H200, workspace_limit=least - 1)


def test_refusal_is_in_cudnn_s_words_on_one_line() -> None:
    with pytest.raises(Refused) as caught:
        compile_plan(attention(BACKWARD, dims=(512, 512)), H200)
    reason = caught.value.reason
    assert reason.rule == "cudnn"
    assert reason.message.startswith("cuDNN: ")
    assert "hidden_dim should be less than or equal to 256" in reason.message
    assert reason.message == " ".join(reason.message.split())
    assert str(caught.value) == str(reason)


def test_plans_are_tried_in_order_until_one_builds(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[int]
) -> None:
    unsupported = runtime.library().cudnnGraphNotSupportedError
    declining(monkeypatch, uncompiled, 1, unsupported("not this\n  one"))
    spec = attention(dims=(64, 64))
    compiled = compile_plan(spec, H200)
    assert uncompiled == [0, 1]
    assert compiled.engine == names(spec)[1] != names(spec)[0]


def test_a_plan_with_too_much_workspace_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[int]
) -> None:
    kind = type(propose_plans(attention(), H200))
    monkeypatch.setattr(kind, "get_workspace_size", lambda self: 1000 - len(uncompiled))
    spec = attention(dims=(64, 64))
    compiled = compile_plan(spec, H200, workspace_limit=998)
    assert uncompiled == [0, 1]
    assert (compiled.engine, compiled.workspace) == (names(spec)[1], 998)
    with pytest.raises(Refused, match=f"the least {1000 - 2 - len(names(spec))}; raise"):
        compile_plan(spec, H200, workspace_limit=0)


def test_when_none_builds_every_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[int]
) -> None:
    unsupported = runtime.library().cudnnGraphNotSupportedError
    declining(monkeypatch, uncompiled, 99, unsupported("NVRTC\n  failed"))
    spec = attention(dims=(64, 64))
    with pytest.raises(Refused) as caught:
        compile_plan(spec, H200)
    each = [f"{name}: cuDNN: NVRTC failed" for name in names(spec)]
    assert len(each) > 1
    message = f"no plan of cuDNN's builds: {'; '.join(each)}"
    assert (caught.value.reason.rule, caught.value.reason.message) == ("cudnn", message)


def test_other_exceptions_are_not_taken_for_a_refusal(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[int]
) -> None:
    declining(monkeypatch, uncompiled, 99, RuntimeError("driver lost"))
    with pytest.raises(RuntimeError, match="driver lost"):
        compile_plan(attention(), H200)
    assert uncompiled == [0]

    def broken(*_: object) -> None:
        raise MemoryError("host memory")

    monkeypatch.setattr(plan, "propose_plans", broken)
    with pytest.raises(MemoryError, match="host memory"):
        compile_plan(attention(), H200)


def test_engines_that_bring_their_own_compiler_are_left_out(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[int]
) -> None:
    graph = propose_plans(attention(), H200)
    foreign = SimpleNamespace(cpp_index=None)
    monkeypatch.setattr(type(graph), "plans", [foreign, foreign])
    with pytest.raises(Refused, match="no plan of cuDNN's builds: it proposed none"):
        compile_plan(attention(), H200)
    assert uncompiled == []


def test_a_graph_with_other_operands_is_an_error(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[int]
) -> None:
    graph = propose_plans(attention(), H200)
    with pytest.raises(RuntimeError, match=r"takes operands \(1, 2, 3, 4\), expected"):
        Plan(attention(lse=True), H200, graph, "eng0")
    assert uncompiled == []


class Machine:
    """Stands in for device memory and the handle: remembers what a run did with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffer = (ctypes.c_uint64 * runtime.MOST_OPERANDS)()
        self.events: list[tuple[Any, ...]] = []
        lease = SimpleNamespace(buffer=self.buffer, address=4096, backend=77)
        monkeypatch.setattr(runtime, "lease", lambda index, stream: lease)
        monkeypatch.setattr(runtime, "allocate", self.allocate)
        monkeypatch.setattr(runtime, "free", lambda address: self.events.append(("free", address)))

    def allocate(self, size: int, stream: int) -> int:
        self.events.append(("allocate", size, stream))
        return 9000

    def execute(self, *arguments: Any) -> None:
        self.events.append(("execute", *arguments))

    def install(self, compiled: Plan, workspace: int) -> Plan:
        compiled.device = dataclasses.replace(H200, index=0)
        compiled.workspace = workspace
        compiled._execute = self.execute
        return compiled


@pytest.mark.usefixtures("uncompiled")
def test_a_run_hands_over_the_addresses_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    compiled = machine.install(compile_plan(attention(lse=True), H200), 0)
    compiled.run([10, 20, 30, 40, 50], stream=5)
    assert machine.events == [("execute", 4096, 5, 0, 77, 0)]
    assert list(machine.buffer[:6]) == [10, 20, 30, 40, 50, 0]


@pytest.mark.usefixtures("uncompiled")
def test_a_run_puts_its_own_lengths_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    bias = tensor((2, 4, 128, 128))
    spec = attention(BACKWARD, padding=True, bias=bias, grad_bias=bias, dropout_p=0.5)
    compiled = machine.install(compile_plan(spec, H200), 128)
    lengths = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    ids = [Uid(uid) for uid in operands(spec)]
    places = [ids.index(uid) for uid in constants(spec)]
    compiled._own = [(at, t.data_ptr()) for at, t in zip(places, lengths, strict=True)]
    assert [Uid(uid).name for uid in constants(spec)] == ["SEQ_LEN_Q", "SEQ_LEN_KV"]
    assert compiled.takes == tuple(uid for uid in ids if uid not in constants(spec))
    kept: list[object] = []
    monkeypatch.setattr(runtime, "keep_for_captures", kept.append)
    given = [1000 + uid for uid in ids if uid.name not in ("SEQ_LEN_Q", "SEQ_LEN_KV")]
    compiled.run(given, stream=5)
    own = {"SEQ_LEN_Q": lengths[0].data_ptr(), "SEQ_LEN_KV": lengths[1].data_ptr()}
    assert list(machine.buffer[: len(ids)]) == [own.get(uid.name, 1000 + uid) for uid in ids]
    assert kept == [compiled]
    assert machine.events == [
        ("allocate", 128, 5),
        ("execute", 4096, len(ids), 9000, 77, 0),
        ("free", 9000),
    ]


@pytest.mark.usefixtures("uncompiled")
def test_workspace_goes_back_when_a_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    compiled = machine.install(compile_plan(attention(), H200), 128)

    def fail(*_: object) -> None:
        raise RuntimeError("launch failed")

    compiled._execute = fail
    with pytest.raises(RuntimeError, match="launch failed"):
        compiled.run([1, 2, 3, 4], stream=0)
    assert machine.events == [("allocate", 128, 0), ("free", 9000)]


# -------------------------------------------------------------------------- plans on disk

CAPPED: dict[str, Any] = {"softcap": 30.0, "slopes": True, "causal": True, "left": 50}
STORED = [
    (profile, spec)
    for profile in ("h200", "b200", "a100-sxm-80gb")
    for spec in (
        attention(causal=True, lse=True, lengths=(200, 72)),
        attention(BACKWARD, causal=True, lengths=(200, 72), dtype="bfloat16"),
    )
]
STORED += [
    ("h200", attention(lse=True, **CAPPED, score_mod=("add", "score", ("sqrt", "kv_index")))),
    ("h200", attention(BACKWARD, **CAPPED)),
    ("h200", ragged(attention(BACKWARD, order=BSHD, causal=True), 128, 128)),
    ("b200", attention(lse=True, softcap=30.0, bottom_right=True, causal=True)),
]

FRESH = """
import json, sys
from cudnn_mha import cache, checks, config, devices
from tests.test_plan import STORED, operand_ids

found = []
for profile, spec in STORED:
    device = devices.described(profile)
    slot = cache.plans.get_or_build(cache.plan_key(spec, device, None))
    found.append([slot.plan.engine, slot.plan.workspace, operand_ids(slot.plan)])
print(json.dumps([found, cache.cache_info()._asdict()]))
"""


def operand_ids(compiled: Plan) -> list[int]:
    """The operands that the graph itself says it takes."""
    return list(compiled._graph._lowered_graph._get_variant_pack_uids_sorted())


def test_a_fresh_process_loads_what_another_compiled(tmp_path: Path) -> None:
    store = Store(tmp_path / "plans")
    expected = []
    for profile, spec in STORED:
        device = devices.described(profile)
        compiled = compile_plan(spec, device)
        store.save(cache.stored(cache.plan_key(spec, device, None), Slot(compiled)))
        expected.append([compiled.engine, compiled.workspace, operand_ids(compiled)])
        assert operand_ids(compiled) == list(operands(spec))
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        env=os.environ | {config.CACHE_DIR: str(store.folder)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found, info = json.loads(done.stdout)
    assert found == expected
    assert (info["builds"], info["loads"], info["refusals"]) == (0, len(STORED), 0)
    assert info["build_seconds"] == 0


UNTOUCHED = """
from cudnn_mha import devices
from cudnn_mha.plan import compile_plan
from tests.support import refusal
from tests.test_plan import CAPPED, attention, BACKWARD

h200 = devices.described("h200")
kept = compile_plan(attention(**CAPPED), h200)
compile_plan(attention(BACKWARD, **CAPPED), h200)
assert refusal(attention(**CAPPED), h200) is None
# cuDNN takes no number there: the graph is refused after its scores were modified.
assert refusal(attention(BACKWARD, score_mod=("sub", 2.0, "score")), h200)
"""


def test_graphs_with_modified_scores_leave_nothing_behind() -> None:
    """The frontend says at exit what was not let go."""
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def blobs_of_no_use(spec: AttentionSpec) -> dict[str, bytes]:
    blob = compile_plan(spec, H200).to_bytes()
    other = compile_plan(attention(lse=not spec.lse), H200).to_bytes()
    return {
        "empty": b"",
        "text": b"no plan at all",
        "random": random.Random(3).randbytes(5000),
        "truncated": blob[: len(blob) // 2],
        "another graph's": other,
    }


def test_a_stored_blob_of_no_use_is_discarded_and_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its file is sound: the checksum is right, and so is the key."""
    spec = attention()
    key = cache.plan_key(spec, H200, None)
    monkeypatch.setenv(config.CACHE_DIR, str(tmp_path / "plans"))
    config.reload()
    try:
        store = Store(tmp_path / "plans")
        for name, blob in blobs_of_no_use(spec).items():
            store.save(Entry(key.to_dict(), "eng0", 0, None, blob))
            plans = cache.PlanCache(4, load=cache._load, save=cache._save)
            slot = plans.get_or_build(key)
            assert slot.plan is not None
            assert slot.plan.engine != "eng0", name
            assert plans.cache_info()[2:4] == (1, 0), name
            entry = store.load(key.to_dict())
            assert entry is not None
            assert (entry.engine, len(entry.blob) > 10_000) == (slot.plan.engine, True), name
            plans.cache_clear()
    finally:
        monkeypatch.undo()
        config.reload()


def test_a_loaded_plan_runs_like_a_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = attention(lse=True)
    compiled = compile_plan(spec, H200)
    loaded = load_plan(spec, H200, compiled.engine, compiled.to_bytes())
    assert (loaded.spec, loaded.device, loaded.engine) == (spec, H200, compiled.engine)
    machine = Machine(monkeypatch)
    machine.install(loaded, 0).run([10, 20, 30, 40, 50], stream=5)
    assert machine.events == [("execute", 4096, 5, 0, 77, -1)]
    assert list(machine.buffer[:6]) == [10, 20, 30, 40, 50, 0]
