"""The plan cache: compiled plans by everything they bake in, shared by all threads.

Least recently used plans go first once the bound is reached. A refusal by cuDNN is an entry like
a plan, so nothing is tried twice. Only one thread builds a key at a time; the others wait for it,
while other keys are served and built.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from cudnn_mha import config, runtime
from cudnn_mha.checks import Reason
from cudnn_mha.devices import Device
from cudnn_mha.plan import Plan, Refused, compile_plan
from cudnn_mha.spec import AttentionSpec


class PlanKey(NamedTuple):
    """Everything that a compiled plan depends on."""

    spec: AttentionSpec
    device: Device
    workspace_limit: int | None
    cudnn_version: int
    frontend_version: str
    environment: tuple[str, ...]


class CacheInfo(NamedTuple):
    """Counters since the start or the last `cache_clear`.

    Attributes:
        hits: lookups answered by a plan or a remembered refusal.
        misses: lookups that were not.
        builds: plans compiled.
        refusals: keys that cuDNN refused.
        evictions: entries dropped to keep the bound.
        build_seconds: time spent on plans and refusals.
        maxsize: the bound on entries.
        currsize: entries now.
    """

    hits: int
    misses: int
    builds: int
    refusals: int
    evictions: int
    build_seconds: float
    maxsize: int
    currsize: int


class Slot:
    """One entry of the cache, which a caller may keep in order to skip the lookup.

    Attributes:
        plan: the plan, or None where cuDNN refused.
        refusal: why there is no plan.
        used: when it was last used, on the cache's own clock.
    """

    __slots__ = ("plan", "refusal", "used")

    def __init__(self, plan: Plan | None, refusal: Reason | None = None) -> None:
        self.plan = plan
        self.refusal = refusal
        self.used = 0


class _Turn:
    """Whose turn it is to build a key; it lasts while any thread wants that key built."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads = 0


class PlanCache:
    """A bounded map from `PlanKey` to `Slot`.

    Args:
        maxsize: bound on entries; None takes the environment's.
        build: makes the plan of ``(spec, device, workspace_limit)`` or raises `Refused`.
    """

    def __init__(
        self, maxsize: int | None = None, build: Callable[..., Plan] = compile_plan
    ) -> None:
        self._maxsize = maxsize
        self._build = build
        self._lock = threading.Lock()
        self._slots: dict[PlanKey, Slot] = {}
        self._turns: dict[PlanKey, _Turn] = {}
        self._listeners: list[Callable[[], None]] = []
        self._clock = 0
        self._reset()

    def _reset(self) -> None:
        self._hits = self._misses = self._builds = self._refusals = self._evictions = 0
        self._build_seconds = 0.0

    @property
    def maxsize(self) -> int:
        return self._maxsize or config.settings().cache_size

    def touch(self, slot: Slot) -> None:
        """Counts a use of a slot that the caller kept."""
        with self._lock:
            self._hits += 1
            self._clock += 1
            slot.used = self._clock

    def get(self, key: PlanKey) -> Slot | None:
        """The slot of ``key``, or None."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                self._misses += 1
                return None
        self.touch(slot)
        return slot

    def get_or_build(self, key: PlanKey) -> Slot:
        """The slot of ``key``, built if it is not there.

        Whatever is not cuDNN's refusal, such as a broken library, is raised and not remembered.
        """
        slot = self.get(key)
        if slot is not None:
            return slot
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
            turn.threads += 1
        try:
            with turn.lock:
                with self._lock:
                    slot = self._slots.get(key)
                return slot or self._fill(key)
        finally:
            with self._lock:
                turn.threads -= 1
                if not turn.threads:
                    del self._turns[key]

    def _fill(self, key: PlanKey) -> Slot:
        start = time.perf_counter()
        try:
            slot = Slot(self._build(key.spec, key.device, key.workspace_limit))
        except Refused as refused:
            slot = Slot(None, refused.reason)
        finally:
            with self._lock:
                self._build_seconds += time.perf_counter() - start
        with self._lock:
            self._builds += slot.plan is not None
            self._refusals += slot.plan is None
            self._clock += 1
            slot.used = self._clock
            self._slots[key] = slot
            surplus = len(self._slots) - self.maxsize
            for _ in range(surplus):
                del self._slots[min(self._slots, key=lambda k: self._slots[k].used)]
                self._evictions += 1
        if surplus > 0:
            self._notify()
        return slot

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._slots

    def on_drop(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` whenever slots are dropped, so that it lets go of them too."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def cache_info(self) -> CacheInfo:
        """The counters now."""
        with self._lock:
            return CacheInfo(
                self._hits,
                self._misses,
                self._builds,
                self._refusals,
                self._evictions,
                self._build_seconds,
                self.maxsize,
                len(self._slots),
            )

    def cache_clear(self) -> None:
        """Drops every entry and sets the counters to zero."""
        with self._lock:
            self._slots.clear()
            self._reset()
        self._notify()


plans = PlanCache()
"""The cache of this process."""

runtime.on_exit(plans.cache_clear)


def plan_key(spec: AttentionSpec, device: Device, workspace_limit: int | None) -> PlanKey:
    """The key of ``spec`` in this process.

    Raises:
        CudnnUnavailableError: there is no cuDNN to build for.
    """
    return PlanKey(
        spec,
        device,
        workspace_limit,
        runtime.cudnn_version(),
        runtime.frontend_version(),
        config.plan_environment(),
    )


def cache_info() -> CacheInfo:
    """Counters of the plan cache."""
    return plans.cache_info()


def cache_clear() -> None:
    """Drops every plan and remembered refusal, and sets the counters to zero."""
    plans.cache_clear()
