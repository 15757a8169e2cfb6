"""The plan cache with a builder that compiles nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnn_mha import cache, config, devices, dispatch, kernels, runtime
from cudnn_mha import store as store_module
from cudnn_mha.cache import CacheInfo, PlanCache, Slot, plan_key
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.config import BUILD, CACHE_DIR, CACHE_SIZE, DP_WORKSPACE_LIMIT, PLANS
from cudnn_mha.devices import Device
from cudnn_mha.plan import Refused
from cudnn_mha.spec import AttentionSpec, TensorSpec
from cudnn_mha.store import FORMAT, Entry, PlanKey, Store
from tests.support import BACKWARD, FORWARD, attention, tensor

H200 = devices.described("h200")
CUDA = f"CUDA {str(torch.version.cuda).split('.')[0]}"
KEY = PlanKey(attention(), H200, None, 92400, "1.32.0", ("",))
PATIENCE = 30.0
"""Seconds after which a thread that should have moved on is given up."""


def key(number: int) -> PlanKey:
    return KEY._replace(workspace_limit=number)


class Builder:
    """Stands in for the compiler: counts what it is asked for, and does as told."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []
        self.before: dict[int, Callable[[], None]] = {}

    def __call__(self, spec: AttentionSpec, device: Device, workspace_limit: int) -> Any:
        self.asked.append(workspace_limit)
        self.before.get(workspace_limit, lambda: None)()
        return f"plan {workspace_limit}"


@pytest.fixture
def builder() -> Builder:
    return Builder()


def text(slot: Slot) -> str:
    return str(slot.plan)


def held(plans: PlanCache, count: int = 20) -> list[int]:
    return [number for number in range(count) if key(number) in plans]


def refuse(rule: str, message: str) -> Callable[[], None]:
    def act() -> None:
        raise Refused(Reason(rule, message))

    return act


def fail(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def started(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end


def test_a_plan_is_built_once_and_found_again(builder: Builder) -> None:
    plans = PlanCache(4, builder)
    assert plans.get(key(1)) is None
    slot = plans.get_or_build(key(1))
    assert text(slot) == "plan 1"
    assert slot.refusal is None
    assert plans.get_or_build(key(1)) is slot
    assert plans.get(key(1)) is slot
    assert builder.asked == [1]


def test_builder_gets_spec_device_and_limit() -> None:
    given: list[tuple[Any, ...]] = []
    plans = PlanCache(4, lambda *arguments: given.append(arguments))
    plans.get_or_build(key(5))
    assert given == [(KEY.spec, H200, 5)]


def test_least_recently_used_goes_first(builder: Builder) -> None:
    plans = PlanCache(3, builder)
    for number in (0, 1, 2):
        plans.get_or_build(key(number))
    plans.get(key(0))
    plans.get_or_build(key(3))
    assert held(plans) == [0, 2, 3]
    plans.get_or_build(key(2))
    plans.get_or_build(key(4))
    assert held(plans) == [2, 3, 4]
    assert plans.cache_info().evictions == 2
    plans.get_or_build(key(1))
    assert builder.asked == [0, 1, 2, 3, 4, 1]


def test_touching_a_kept_slot_counts_as_use(builder: Builder) -> None:
    plans = PlanCache(2, builder)
    kept = plans.get_or_build(key(0))
    plans.get_or_build(key(1))
    plans.touch(kept)
    plans.get_or_build(key(2))
    assert held(plans) == [0, 2]
    assert plans.cache_info().hits == 1


def test_listeners_hear_of_dropped_slots_only(builder: Builder) -> None:
    plans = PlanCache(1, builder)
    heard: list[str] = []
    plans.on_drop(lambda: heard.append("first"))
    plans.on_drop(lambda: heard.append("second"))
    plans.get_or_build(key(0))
    plans.get_or_build(key(0))
    assert heard == []
    plans.get_or_build(key(1))
    assert heard == ["first", "second"]
    plans.cache_clear()
    assert heard == ["first", "second"] * 2


def test_a_listener_may_use_the_cache(builder: Builder) -> None:
    plans = PlanCache(1, builder)
    seen: list[int] = []
    plans.on_drop(lambda: seen.append(plans.cache_info().currsize))
    plans.get_or_build(key(0))
    plans.get_or_build(key(1))
    assert seen == [1]


def test_refusals_are_remembered_with_their_words(builder: Builder) -> None:
    plans = PlanCache(4, builder)
    builder.before[7] = refuse("cudnn", "cuDNN: no engine")
    for _ in range(3):
        slot = plans.get_or_build(key(7))
        assert slot.plan is None
        assert slot.refusal == Reason("cudnn", "cuDNN: no engine")
    assert builder.asked == [7]
    info = plans.cache_info()
    assert (info.hits, info.misses, info.builds, info.refusals) == (2, 1, 0, 1)


def test_other_exceptions_surface_and_are_not_remembered(builder: Builder) -> None:
    plans = PlanCache(4, builder)
    builder.before[7] = fail(OSError("libnvrtc.so is missing"))
    for _ in range(2):
        with pytest.raises(OSError, match=r"libnvrtc\.so is missing"):
            plans.get_or_build(key(7))
    info = plans.cache_info()
    assert (info.builds, info.refusals, info.currsize, info.misses) == (0, 0, 0, 2)
    del builder.before[7]
    assert text(plans.get_or_build(key(7))) == "plan 7"
    assert builder.asked == [7, 7, 7]


def test_time_spent_includes_refusals_and_failures(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    plans = PlanCache(4, builder)
    builder.before = {2: refuse("cudnn", "no"), 3: fail(OSError())}
    plans.get_or_build(key(1))
    plans.get_or_build(key(2))
    with pytest.raises(OSError):
        plans.get_or_build(key(3))
    plans.get_or_build(key(1))
    assert plans.cache_info().build_seconds == 3.0


def test_clearing_forgets_plans_refusals_and_counters(builder: Builder) -> None:
    plans = PlanCache(2, builder)
    builder.before[1] = refuse("cudnn", "no")
    for number in (0, 1, 2, 2):
        plans.get_or_build(key(number))
    assert plans.cache_info()[:6] == (1, 3, 2, 0, 1, 1)
    plans.cache_clear()
    assert plans.cache_info() == CacheInfo(0, 0, 0, 0, 0, 0, 0.0, 2, 0)
    plans.get_or_build(key(1))
    assert builder.asked == [0, 1, 2, 1]


def test_bound_comes_from_the_environment(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = PlanCache(build=builder)
    monkeypatch.setenv(CACHE_SIZE, "9")
    try:
        config.reload()
        for number in range(12):
            plans.get_or_build(key(number))
        assert held(plans) == list(range(3, 12))
        monkeypatch.setenv(CACHE_SIZE, "2")
        config.reload()
        plans.get_or_build(key(12))
        assert plans.maxsize == 2
        assert held(plans) == [11, 12]
        assert plans.cache_info().evictions == 11
    finally:
        monkeypatch.undo()
        config.reload()


def test_many_keys_stay_within_the_bound() -> None:
    """In number, in memory and in the time that each takes."""
    count, bound = 200_000, 64
    plans = PlanCache(bound, lambda *_: "plan")
    currsizes = set()
    start = time.process_time()
    for number in range(count):
        plans.get_or_build(key(number))
        if number == count // 2:
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
        if number % 1000 == 999:
            currsizes.add(plans.cache_info().currsize)
            if number == count // 2 + 9999:  # tracing is slow: a part of the way will do
                after, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
    assert time.process_time() - start < 60
    assert currsizes == {bound}
    assert after - before < 100_000  # all of 10,000 kept would be above 1 MB
    assert plans.cache_info()[:6] == (0, count, count, 0, 0, count - bound)
    assert not plans._turns
    assert held(plans, count) == list(range(count - bound, count))


def test_one_build_per_key_under_many_threads(builder: Builder) -> None:
    plans = PlanCache(4, builder)
    count = 16
    ready = threading.Barrier(count)
    slots = []

    def work() -> None:
        ready.wait(PATIENCE)
        slots.append(plans.get_or_build(key(1)))

    join(*[started(work) for _ in range(count)])
    assert builder.asked == [1]
    assert len(slots) == count
    assert len({id(slot) for slot in slots}) == 1
    assert plans.cache_info().builds == 1


def test_other_keys_are_served_and_built_meanwhile(builder: Builder) -> None:
    plans = PlanCache(4, builder)
    plans.get_or_build(key(0))
    building, release = threading.Event(), threading.Event()

    def wait() -> None:
        building.set()
        assert release.wait(PATIENCE)

    builder.before[1] = wait
    slow = started(lambda: plans.get_or_build(key(1)))
    assert building.wait(PATIENCE)
    assert text(plans.get_or_build(key(0))) == "plan 0"
    assert text(plans.get_or_build(key(2))) == "plan 2"
    assert key(1) not in plans
    assert plans.cache_info().builds == 2
    release.set()
    join(slow)
    assert key(1) in plans


def test_threads_that_waited_for_a_failure_build_one_at_a_time(builder: Builder) -> None:
    """One thread fails, one that waited for it builds: a third one waits for that."""
    plans = PlanCache(4, builder)
    first, second, third = threading.Event(), threading.Event(), threading.Event()
    release = [threading.Event(), threading.Event()]

    def act() -> None:
        if len(builder.asked) == 1:
            first.set()
            assert release[0].wait(PATIENCE)
            raise OSError("broken")
        if len(builder.asked) > 2:
            third.set()
            return
        second.set()
        assert release[1].wait(PATIENCE)

    def attempt() -> None:
        with pytest.raises(OSError, match="broken"):
            plans.get_or_build(key(1))

    builder.before[1] = act
    threads = [started(attempt)]
    assert first.wait(PATIENCE)
    threads.append(started(lambda: plans.get_or_build(key(1))))
    until(lambda: plans._turns[key(1)].threads == 2)
    release[0].set()
    assert second.wait(PATIENCE)
    threads.append(started(lambda: plans.get_or_build(key(1))))
    assert not third.wait(0.2)  # a third build beside the second would have begun by now
    release[1].set()
    join(*threads)
    assert builder.asked == [1, 1]
    assert not plans._turns


@pytest.mark.parametrize("maxsize", [20, 3])
def test_counters_are_exact_under_threads(builder: Builder, maxsize: int) -> None:
    plans = PlanCache(maxsize, builder)
    count, rounds, keys = 8, 250, 20
    ready = threading.Barrier(count)

    def work(seed: int) -> None:
        ready.wait(PATIENCE)
        for step in range(rounds):
            number = (seed + 7 * step) % keys
            assert text(plans.get_or_build(key(number))) == f"plan {number}"

    join(*[started(lambda seed=seed: work(seed)) for seed in range(count)])
    info = plans.cache_info()
    assert info.hits + info.misses == count * rounds
    assert info.builds == len(builder.asked)
    assert info.builds - info.evictions == info.currsize == maxsize
    if maxsize == keys:
        assert info.builds == keys


def test_the_cache_of_the_process(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "plans", PlanCache(4, builder))
    cache.plans.get_or_build(key(0))
    assert cache.cache_info()[:3] == (0, 1, 1)
    cache.cache_clear()
    assert cache.cache_info() == CacheInfo(0, 0, 0, 0, 0, 0, 0.0, 4, 0)


def changed(layout: TensorSpec | None) -> list[TensorSpec | None]:
    """The layout with another shape, stride or dtype; another layout where there was none."""
    if layout is None:
        return [tensor((2, 4, 128, 128))]
    shape, stride, dtype = layout
    return [
        TensorSpec((shape[0] + 1, *shape[1:]), stride, dtype),
        TensorSpec(shape, (stride[0] + 8, *stride[1:]), dtype),
        TensorSpec(shape, stride, "bfloat16"),
    ]


BASE = attention(BACKWARD)
CHANGES: dict[str, list[Any]] = {
    "direction": [FORWARD],
    "scale": [BASE.scale * (1 + 1e-15), -BASE.scale],
    "causal": [True],
    "dropout_p": [0.1],
    "lse": [True],
    "padding": [True],
    "deterministic": [True],
    "left": [0, 5],
    "right": [0, 5],
    "bottom_right": [True],
    "softcap": [0.5, 30.0],
    "score_mod": [("neg", "score"), ("mul", "score", 0.5), ("mul", "score", 0.25)],
    "alibi": [True],
    "slopes": [True],
    "sinks": [True],
    "grad_sinks": [True],
    "lengths": [True],
    "ragged": [True],
    "tokens_q": [0, 128],
    "tokens_kv": [0, 128],
}
CHANGES |= {
    field.name: changed(getattr(BASE, field.name))
    for field in dataclasses.fields(AttentionSpec)
    if field.name not in CHANGES and field.compare
}


def test_every_field_of_the_spec_is_varied() -> None:
    fields = {field.name for field in dataclasses.fields(AttentionSpec)} - {"_hash"}
    assert set(CHANGES) == fields


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in CHANGES.items() for v in vs])
def test_each_field_of_the_spec_separates_keys(builder: Builder, name: str, value: object) -> None:
    other = dataclasses.replace(BASE, **{name: value})
    assert other != BASE
    assert hash(other) != hash(BASE)
    plans = PlanCache(4, builder)
    one = plans.get_or_build(KEY._replace(spec=BASE))
    assert plans.get_or_build(KEY._replace(spec=other)) is not one


OTHER_KEYS: dict[str, list[Any]] = {
    "spec": [attention(batch=3)],
    "device": [
        devices.described("b200"),
        dataclasses.replace(H200, index=0),
        dataclasses.replace(H200, index=1),
        dataclasses.replace(H200, properties=""),
    ],
    "workspace_limit": [0, 1],
    "cudnn_version": [92401],
    "frontend_version": ["1.32.1"],
    "environment": [("0",)],
}


def test_every_field_of_the_key_is_varied() -> None:
    assert tuple(OTHER_KEYS) == PlanKey._fields


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in OTHER_KEYS.items() for v in vs])
def test_each_field_of_the_key_separates(builder: Builder, name: str, value: object) -> None:
    other = KEY._replace(**{name: value})
    assert other != KEY
    assert hash(other) != hash(KEY)
    plans = PlanCache(4, builder)
    assert plans.get_or_build(other) is not plans.get_or_build(KEY)


def test_key_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DP_WORKSPACE_LIMIT, raising=False)
    plain = plan_key(BASE, H200, 5)
    assert plain == PlanKey(
        BASE,
        H200,
        5,
        runtime.library().backend_version(),
        runtime.library().__version__,
        (CUDA, ""),
    )
    monkeypatch.setenv(DP_WORKSPACE_LIMIT, "1048576")
    assert plan_key(BASE, H200, 5) == plain._replace(environment=(CUDA, "1048576"))


# -------------------------------------------------------------------------- behind it, the disk


class Disk:
    """Stands in for the folders of plans."""

    def __init__(self) -> None:
        self.slots: dict[PlanKey, Slot] = {}
        self.asked: list[int | None] = []
        self.saved: list[int | None] = []

    def load(self, key: PlanKey) -> Slot | None:
        self.asked.append(key.workspace_limit)
        return self.slots.get(key)

    def save(self, key: PlanKey, slot: Slot) -> None:
        self.saved.append(key.workspace_limit)
        self.slots[key] = slot


def test_what_is_on_disk_is_not_built(builder: Builder) -> None:
    disk = Disk()
    disk.slots = {key(0): Slot(None, Reason("cudnn", "no")), key(1): Slot("plan of before")}
    plans = PlanCache(4, builder, disk.load, disk.save)
    assert text(plans.get_or_build(key(1))) == "plan of before"
    assert plans.get_or_build(key(0)).refusal == Reason("cudnn", "no")
    assert text(plans.get_or_build(key(1))) == "plan of before"
    assert (builder.asked, disk.asked, disk.saved) == ([], [1, 0], [])
    info = plans.cache_info()
    assert (info.hits, info.misses, info.builds, info.loads, info.refusals) == (1, 2, 0, 2, 1)
    assert info.build_seconds == 0


def test_what_is_built_is_saved_and_failures_are_not(builder: Builder) -> None:
    disk = Disk()
    plans = PlanCache(2, builder, disk.load, disk.save)
    builder.before = {1: refuse("cudnn", "no"), 2: fail(OSError("broken"))}
    plans.get_or_build(key(0))
    plans.get_or_build(key(1))
    with pytest.raises(OSError, match="broken"):
        plans.get_or_build(key(2))
    assert disk.saved == [0, 1]
    info = plans.cache_info()
    assert (info.builds, info.loads, info.refusals) == (1, 0, 1)
    plans.cache_clear()
    assert plans.cache_info().builds == 0
    for number in (0, 1, 1):
        plans.get_or_build(key(number))
    info = plans.cache_info()
    assert (info.hits, info.builds, info.loads, info.refusals) == (1, 0, 2, 1)


def test_evicted_plans_come_back_from_disk(builder: Builder) -> None:
    disk = Disk()
    plans = PlanCache(2, builder, disk.load, disk.save)
    for number in (*range(5), *range(5)):
        assert text(plans.get_or_build(key(number))) == f"plan {number}"
    info = plans.cache_info()
    assert (info.builds, info.loads, info.evictions, info.currsize) == (5, 5, 8, 2)
    assert builder.asked == list(range(5))


def test_looking_without_building(builder: Builder) -> None:
    disk = Disk()
    plans = PlanCache(4, builder, disk.load, disk.save)
    assert plans.get_or_load(key(1)) is None
    assert key(1) not in plans
    assert plans.get_or_load(key(1)) is None  # not remembered: it may come
    disk.slots[key(1)] = Slot("plan of another")
    slot = plans.get_or_load(key(1))
    assert slot is not None
    assert text(slot) == "plan of another"
    assert plans.get_or_load(key(1)) is plans.get_or_build(key(1)) is slot
    assert (builder.asked, disk.asked) == ([], [1, 1, 1])
    info = plans.cache_info()
    assert (info.hits, info.misses, info.builds, info.loads, info.currsize) == (2, 3, 0, 1, 1)
    assert not plans._turns


def test_looking_waits_for_a_build_that_goes_on(builder: Builder) -> None:
    plans = PlanCache(4, builder)
    building, release = threading.Event(), threading.Event()

    def wait() -> None:
        building.set()
        assert release.wait(PATIENCE)

    builder.before[1] = wait
    found: list[Slot | None] = []
    threads = [started(lambda: plans.get_or_build(key(1)))]
    assert building.wait(PATIENCE)
    threads.append(started(lambda: found.append(plans.get_or_load(key(1)))))
    until(lambda: plans._turns[key(1)].threads == 2)
    release.set()
    join(*threads)
    assert found == [plans.get(key(1))]
    assert builder.asked == [1]


@dataclasses.dataclass
class FakePlan:
    """A plan whose bytes are its name."""

    spec: AttentionSpec
    name: bytes
    engine: str = "eng1"
    workspace: int = 64

    def to_bytes(self) -> bytes:
        return self.name


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder in force for the cache of the process; fake plans are read back from it."""

    def load(spec: AttentionSpec, device: Device, engine: str, data: bytes) -> FakePlan:
        if data == b"garbage":
            raise RuntimeError("bad\n  blob")
        return FakePlan(spec, data, engine)

    monkeypatch.setattr(cache, "load_plan", load)
    monkeypatch.setattr(cache, "_current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cache, "_loaded", [])
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "own"))
    config.reload()
    yield tmp_path / "own"
    monkeypatch.undo()
    config.reload()


def fresh(names: list[bytes]) -> PlanCache:
    """A cache as a new process has it, which compiles these plans one by one."""
    left = iter(names)
    return PlanCache(
        8, lambda spec, *_: FakePlan(spec, next(left)), load=cache._load, save=cache._save
    )


def named(slot: Slot) -> bytes:
    assert isinstance(slot.plan, FakePlan)
    return slot.plan.name


def test_another_process_finds_plans_and_refusals_on_disk(folder: Path) -> None:
    assert named(fresh([b"one"]).get_or_build(key(1))) == b"one"

    def refusing(*_: Any) -> Any:
        raise Refused(Reason("cudnn", "cuDNN: no engine"))

    PlanCache(8, refusing, load=cache._load, save=cache._save).get_or_build(key(2))
    plans = fresh([])
    slot = plans.get_or_build(key(1))
    assert named(slot) == b"one"
    assert plans.get_or_build(key(2)).refusal == Reason("cudnn", "cuDNN: no engine")
    assert plans.cache_info()[2:5] == (0, 2, 1)
    assert len(Store(folder).files()) == 2


def test_a_card_finds_what_was_compiled_for_its_description(folder: Path) -> None:
    fresh([b"one"]).get_or_build(key(1))
    card = dataclasses.replace(H200, index=3, properties="", memory=H200.memory - 5)
    assert named(fresh([]).get_or_build(key(1)._replace(device=card))) == b"one"


def test_a_plan_that_cannot_be_loaded_is_discarded_and_compiled(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(folder)
    bad = Entry(key(1).to_dict(), "eng1", 64, None, b"garbage")
    store.save(bad)
    with caplog.at_level(logging.INFO, "cudnn_mha"):
        plans = fresh([b"new"])
        assert named(plans.get_or_build(key(1))) == b"new"
    assert "is ignored: cuDNN cannot load it: bad blob" in caplog.text
    assert plans.cache_info()[2:4] == (1, 0)
    entry = store.load(bad.key)
    assert entry is not None
    assert entry.blob == b"new"


def test_folders_are_asked_in_order_and_only_the_own_one_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = [tmp_path / name for name in ("loaded", "first", "second")] + [folder]
    monkeypatch.setenv(PLANS, os.pathsep.join(map(str, places[1:3])))
    config.reload()
    cache.add_store(Store(places[0], read_only=True))
    cache.add_store(Store(places[0], read_only=True))
    assert [store.folder for store in cache.stores()] == places
    assert [store.read_only for store in cache.stores()] == [True, True, True, False]
    for place in places:
        Store(place).save(Entry(key(1).to_dict(), "eng", 0, None, str(place).encode()))
    for place in places:
        assert named(fresh([]).get_or_build(key(1))) == str(place).encode()
        Store(place).clear()
    assert named(fresh([b"new"]).get_or_build(key(1))) == b"new"
    assert [len(Store(place).files()) for place in places] == [0, 0, 0, 1]


def test_a_disk_that_takes_no_more_costs_one_warning_and_no_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "write_whole", full)
    plans = fresh([b"one", b"two"])
    assert [named(plans.get_or_build(key(number))) for number in (1, 2)] == [b"one", b"two"]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"plans are not kept in {folder}: [Errno 28]")


def test_no_folder_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR, "off")
    config.reload()
    assert cache.stores() == ()
    assert named(fresh([b"one"]).get_or_build(key(1))) == b"one"
    assert not folder.exists()


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in CHANGES.items() for v in vs])
def test_each_field_of_the_spec_separates_files(tmp_path: Path, name: str, value: object) -> None:
    store = Store(tmp_path)
    other = dataclasses.replace(BASE, **{name: value})
    paths = [store.path(KEY._replace(spec=spec).to_dict()) for spec in (BASE, other)]
    assert paths[0] != paths[1]


def test_each_other_field_of_the_key_separates_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    others = [
        KEY,
        KEY._replace(device=dataclasses.replace(H200, name="NVIDIA H20")),
        KEY._replace(device=dataclasses.replace(H200, sm=91)),
        KEY._replace(device=dataclasses.replace(H200, multiprocessors=114)),
        KEY._replace(workspace_limit=0),
        KEY._replace(workspace_limit=1),
        KEY._replace(cudnn_version=92401),
        KEY._replace(frontend_version="1.32.1"),
        KEY._replace(environment=("0",)),
    ]
    paths = {store.path(other.to_dict()) for other in others}
    monkeypatch.setattr(store_module, "FORMAT", FORMAT + 1)
    paths.add(store.path(KEY.to_dict()))
    assert len(paths) == len(others) + 1


def test_what_differs_between_two_cards_of_one_kind_shares_a_file(tmp_path: Path) -> None:
    card = dataclasses.replace(H200, index=1, properties="", memory=1)
    names = [KEY.to_dict(), KEY._replace(device=card).to_dict()]
    assert Store(tmp_path).path(names[0]) == Store(tmp_path).path(names[1])


# ------------------------------------------------------------------------ when plans are compiled

CARD = dataclasses.replace(H200, index=0, properties="")


class Process:
    """A process with a card, whose compiler is a stand-in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, builder: Builder) -> None:
        self.builder = builder
        self.disk = Disk()
        self.plans = PlanCache(8, builder, self.disk.load, self.disk.save)
        self.background = cache._Background()
        self.patch = monkeypatch
        for module in (cache, dispatch):
            monkeypatch.setattr(module, "plans", self.plans)
        monkeypatch.setattr(dispatch, "background", self.background)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def mode(self, name: str) -> None:
        self.patch.setenv(BUILD, name)
        config.reload()

    def find(self, number: int, device: Device = CARD) -> tuple[Slot | None, list[str]]:
        slot, reasons = dispatch.find_plan(BASE, device, number)
        return slot, [reason.rule for reason in reasons]

    def wait(self) -> None:
        until(lambda: not self.background._wanted)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, builder: Builder) -> Iterator[Process]:
    made = Process(monkeypatch, builder)
    yield made
    made.background.stop()
    monkeypatch.undo()
    config.reload()


def test_now_waits_for_the_plan(process: Process) -> None:
    process.mode("now")
    slot, reasons = process.find(1)
    assert slot is not None
    assert (text(slot), reasons) == ("plan 1", [])


def test_never_compiles_none_and_takes_what_is_there(process: Process) -> None:
    process.mode("never")
    assert process.find(1) == (None, ["not_compiled"])
    assert process.builder.asked == []
    _, (reason,) = dispatch.find_plan(BASE, CARD, 1)
    assert reason.kind is Kind.UNAVAILABLE
    assert f"{BUILD}=never compiles none" in reason.message
    assert "`cudnn-mha compile`" in reason.message
    process.disk.slots[plan_key(BASE, CARD, 1)] = Slot("plan of before")
    slot, reasons = process.find(1)
    assert slot is not None
    assert (text(slot), reasons) == ("plan of before", [])
    process.disk.slots[plan_key(BASE, CARD, 2)] = Slot(None, Reason("cudnn", "no"))
    assert process.find(2) == (None, ["cudnn"])
    assert process.builder.asked == []


def test_a_described_gpu_is_compiled_for_at_once_or_never(process: Process) -> None:
    for number, mode in enumerate(("background", "now")):
        process.mode(mode)
        slot, reasons = process.find(number, H200)
        assert slot is not None
        assert (text(slot), reasons) == (f"plan {number}", [])
    process.mode("never")
    assert process.find(7, H200) == (None, ["not_compiled"])


def test_plans_compiled_ahead_that_are_others_are_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_loaded", [Store(tmp_path, read_only=True)])
    monkeypatch.setattr(cache, "_told", [])
    for limit in (5, 6):
        assert cache._load(KEY._replace(workspace_limit=limit)) is None
    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert "on NVIDIA H200, workspace limit 5, cuDNN 9.24.0" in record.getMessage()


def test_background_gives_the_plan_once_it_is_there(process: Process) -> None:
    process.mode("background")
    building, release = threading.Event(), threading.Event()

    def wait() -> None:
        building.set()
        assert release.wait(PATIENCE)

    process.builder.before[1] = wait
    _, (reason,) = dispatch.find_plan(BASE, CARD, 1)
    assert (reason.rule, reason.kind) == ("compiling", Kind.UNAVAILABLE)
    assert f"{BUILD}=background" in reason.message
    assert building.wait(PATIENCE)
    process.background.want(plan_key(BASE, CARD, 1))
    release.set()
    process.wait()
    slot, reasons = process.find(1)
    assert slot is not None
    assert (text(slot), reasons) == ("plan 1", [])
    assert process.builder.asked == [1]
    assert process.disk.saved == [1]


def test_background_learns_of_refusals_too(process: Process) -> None:
    process.mode("background")
    process.builder.before[1] = refuse("cudnn", "no engine")
    assert process.find(1) == (None, ["compiling"])
    process.wait()
    assert process.find(1) == (None, ["cudnn"])


def test_a_failure_in_the_background_is_the_next_calls(process: Process) -> None:
    process.mode("background")
    process.builder.before[1] = fail(OSError("libnvrtc.so is missing"))
    assert process.find(1) == (None, ["compiling"])
    process.wait()
    with pytest.raises(OSError, match="is missing"):
        process.find(1)
    del process.builder.before[1]
    assert process.find(1) == (None, ["compiling"])
    process.wait()
    slot, _ = process.find(1)
    assert slot is not None
    assert text(slot) == "plan 1"


def test_stopping_finishes_what_is_begun_and_drops_the_rest(process: Process) -> None:
    process.mode("background")
    release = threading.Event()

    def wait() -> None:
        assert release.wait(PATIENCE)

    for number in range(10):
        process.builder.before[number] = wait
        process.find(number)
    until(lambda: len(process.builder.asked) == 2)
    stopping = started(process.background.stop)
    until(lambda: not process.background._threads)
    time.sleep(0.05)
    release.set()
    join(stopping)
    assert set(process.disk.saved) == {0, 1}


def test_a_decision_to_wait_is_not_kept(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of the same signature asks again, and gets the plan."""
    monkeypatch.setattr(kernels, "decide", functools.partial(dispatch.decide, device=CARD))
    decisions: dispatch.Decisions[dispatch.Decision] = dispatch.Decisions()
    monkeypatch.setattr(kernels, "_decisions", decisions)
    q = torch.empty(2, 4, 128, 64, dtype=torch.float16, device="meta")

    def rules() -> list[str]:
        decision = kernels.find(q, q, q, None, kernels.Arguments(workspace_limit=7), False)
        return [reason.rule for reason in decision.reasons]

    monkeypatch.setattr(process.plans, "_build", lambda *_: FakePlan(attention(), b"plan"))
    process.mode("background")
    assert rules() == ["compiling"]
    assert decisions == {}
    process.wait()
    assert rules() == []
    assert len(decisions) == 1
    # One never to compile is kept, until plans are dropped or a folder is added.
    process.plans.cache_clear()
    process.disk.slots.clear()
    decisions.clear()
    process.mode("never")
    assert rules() == ["not_compiled"]
    assert len(decisions) == 1


AT_EXIT = """
import dataclasses, time
from cudnn_mha import cache, devices
from tests.support import attention

def build(*_):
    time.sleep(0.1)
    print("built", flush=True)

cache.plans._build = build
card = dataclasses.replace(devices.described("h200"), index=0)
for number in range(20):
    cache.background.want(cache.plan_key(attention(), card, number))
"""


def test_an_exit_waits_for_no_plan_that_is_not_begun() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("built") <= 4


@pytest.mark.parametrize("index", [None, 1])
def test_plans_are_compiled_and_loaded_with_their_gpu_current(
    monkeypatch: pytest.MonkeyPatch, index: int | None
) -> None:
    entered: list[int | None] = []

    class Guard:
        def __init__(self, index: int | None) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    def made(*_: object) -> Any:
        assert entered == ([] if index is None else [index])
        return "plan"

    class Found:
        def load(self, _: dict[str, Any]) -> Entry:
            return Entry(KEY.to_dict(), "engine", 0, None, b"code")

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(cache, "stores", lambda: (Found(),))
    monkeypatch.setattr(cache, "compile_plan", made)
    monkeypatch.setattr(cache, "load_plan", made)
    where = dataclasses.replace(H200, index=index)
    cache._build(KEY.spec, where, None)
    entered.clear()
    loaded = cache._load(KEY._replace(device=where))
    assert loaded is not None and loaded.plan == "plan"  # type: ignore[comparison-overlap]
