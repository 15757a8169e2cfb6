"""The plan cache with a builder that compiles nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_mha import cache, config, devices, runtime
from cudnn_mha.cache import CacheInfo, PlanCache, PlanKey, Slot, plan_key
from cudnn_mha.checks import Reason
from cudnn_mha.config import CACHE_SIZE, DP_WORKSPACE_LIMIT
from cudnn_mha.devices import Device
from cudnn_mha.plan import Refused
from cudnn_mha.spec import AttentionSpec, TensorSpec
from tests.support import BACKWARD, FORWARD, attention, tensor

H200 = devices.described("h200")
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
    assert plans.cache_info()[:5] == (1, 3, 2, 1, 1)
    plans.cache_clear()
    assert plans.cache_info() == CacheInfo(0, 0, 0, 0, 0, 0.0, 2, 0)
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


def test_many_keys_stay_within_the_bound(builder: Builder) -> None:
    plans = PlanCache(16, builder)
    sizes = set()
    for number in range(50_000):
        plans.get_or_build(key(number))
        sizes.add(plans.cache_info().currsize)
    assert max(sizes) == 16
    assert plans.cache_info()[:5] == (0, 50_000, 50_000, 0, 50_000 - 16)
    assert not plans._turns
    assert held(plans, 50_000) == list(range(50_000 - 16, 50_000))


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
    assert cache.cache_info() == CacheInfo(0, 0, 0, 0, 0, 0.0, 4, 0)


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
        BASE, H200, 5, runtime.library().backend_version(), runtime.library().__version__, ("",)
    )
    monkeypatch.setenv(DP_WORKSPACE_LIMIT, "1048576")
    assert plan_key(BASE, H200, 5) == plain._replace(environment=("1048576",))
