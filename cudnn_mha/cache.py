"""The plan cache: compiled plans by everything they bake in, shared by all threads.

Least recently used plans go first once the bound is reached. A refusal by cuDNN is an entry like
a plan, so nothing is tried twice. Only one thread builds a key at a time; the others wait for it,
while other keys are served and built. Behind it are folders of plans that other processes left;
see `cudnn_mha.store`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from cudnn_mha import config, runtime
from cudnn_mha.autotune import tuned_plan
from cudnn_mha.checks import Reason
from cudnn_mha.devices import Device
from cudnn_mha.plan import Plan, Refused, compile_plan, load_plan
from cudnn_mha.spec import AttentionSpec
from cudnn_mha.store import Entry, PlanKey, Store

logger = logging.getLogger("cudnn_mha")


class CacheInfo(NamedTuple):
    """Counters since the start or the last `cache_clear`.

    Attributes:
        hits: lookups answered by a plan or a remembered refusal.
        misses: lookups that were not.
        builds: plans compiled.
        loads: plans and refusals taken from disk.
        refusals: keys that cuDNN refused.
        evictions: entries dropped to keep the bound.
        build_seconds: time spent on compiling plans and finding refusals.
        maxsize: the bound on entries.
        currsize: entries now.
    """

    hits: int
    misses: int
    builds: int
    loads: int
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


class Counter:
    """Counts for many threads without a lock, at the price of a slower reading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Starts at zero again."""
        self.add: Callable[[], int] = itertools.count().__next__  # atomic
        self._readings = 0

    @property
    def value(self) -> int:
        """How often `add` was called."""
        with self._lock:
            self._readings += 1
            return self.add() - self._readings + 1  # each reading counts too


class _Turn:
    """Whose turn it is to build a key; it lasts while any thread wants that key built."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads = 0


def _load_nothing(key: PlanKey) -> Slot | None:
    return None


def _save_nothing(key: PlanKey, slot: Slot) -> None:
    pass


class PlanCache:
    """A bounded map from `PlanKey` to `Slot`.

    Args:
        maxsize: bound on entries; None takes the environment's.
        build: makes the plan of ``(spec, device, workspace_limit)`` or raises `Refused`.
        load: finds what another process made of a key, or None.
        save: keeps for other processes what `build` made.
    """

    def __init__(
        self,
        maxsize: int | None = None,
        build: Callable[..., Plan] = compile_plan,
        load: Callable[[PlanKey], Slot | None] = _load_nothing,
        save: Callable[[PlanKey, Slot], None] = _save_nothing,
    ) -> None:
        self._maxsize = maxsize
        self._build = build
        self._load = load
        self._save = save
        self._lock = threading.Lock()
        self._slots: dict[PlanKey, Slot] = {}
        self._turns: dict[PlanKey, _Turn] = {}
        self._listeners: list[Callable[[], None]] = []
        self._tick = itertools.count(1).__next__  # the cache's clock; atomic, as a lock is not free
        self._hits = Counter()
        self._reset()

    def _reset(self) -> None:
        self._hits.reset()
        self._misses = self._builds = self._loads = 0
        self._refusals = self._evictions = 0
        self._build_seconds = 0.0

    @property
    def maxsize(self) -> int:
        return self._maxsize or config.settings().cache_size

    def touch(self, slot: Slot) -> None:
        """Counts a use of a slot that the caller kept."""
        self._hits.add()
        slot.used = self._tick()

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
        """The slot of ``key``, loaded or else built if it is not there.

        Whatever is not cuDNN's refusal, such as a broken library, is raised and not remembered.
        """
        slot = self._get_or_fill(key, build=True)
        assert slot is not None
        return slot

    def get_or_load(self, key: PlanKey) -> Slot | None:
        """The slot of ``key``, loaded if it is not there; None where it would have to be built."""
        return self._get_or_fill(key, build=False)

    def _get_or_fill(self, key: PlanKey, *, build: bool) -> Slot | None:
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
                return slot or self._fill(key, build)
        finally:
            with self._lock:
                turn.threads -= 1
                if not turn.threads:
                    del self._turns[key]

    def _fill(self, key: PlanKey, build: bool) -> Slot | None:
        slot = self._load(key)
        loaded = slot is not None
        if slot is None and not build:
            return None
        if slot is None:
            slot = self._compile(key)
            self._save(key, slot)
        with self._lock:
            self._loads += loaded
            self._builds += slot.plan is not None and not loaded
            self._refusals += slot.plan is None
            slot.used = self._tick()
            self._slots[key] = slot
            surplus = len(self._slots) - self.maxsize
            for _ in range(surplus):
                del self._slots[min(self._slots, key=lambda k: self._slots[k].used)]
                self._evictions += 1
        if surplus > 0:
            self.forget_kept()
        return slot

    def _compile(self, key: PlanKey) -> Slot:
        start = time.perf_counter()
        try:
            return Slot(self._build(key.spec, key.device, key.workspace_limit))
        except Refused as refused:
            return Slot(None, refused.reason)
        finally:
            with self._lock:
                self._build_seconds += time.perf_counter() - start

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._slots

    def on_drop(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` whenever slots are dropped, so that it lets go of them too."""
        self._listeners.append(listener)

    def forget_kept(self) -> None:
        """Makes callers that kept slots look them up again."""
        for listener in self._listeners:
            listener()

    def cache_info(self) -> CacheInfo:
        """The counters now."""
        with self._lock:
            return CacheInfo(
                self._hits.value,
                self._misses,
                self._builds,
                self._loads,
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
        self.forget_kept()


@functools.lru_cache(maxsize=8)
def _stores(settings: config.Settings) -> tuple[Store, ...]:
    for folder in settings.plans:
        if not folder.is_dir():
            logger.warning("%s names %s, which is no folder", config.PLANS, folder)
    ahead = [Store(folder, read_only=True) for folder in settings.plans]
    if settings.cache_dir is None:
        return tuple(ahead)
    return (*ahead, Store(settings.cache_dir, settings.cache_bytes))


_loaded: list[Store] = []


def stores() -> tuple[Store, ...]:
    """Where plans of other processes are looked for, in this order; the last may be written."""
    return (*_loaded, *_stores(config.settings()))


def add_store(store: Store) -> None:
    """Looks for plans in one more folder, before the others."""
    if store.folder not in (known.folder for known in _loaded):
        _loaded.insert(0, store)


def _load(key: PlanKey) -> Slot | None:
    name = key.to_dict()
    for store in stores():
        entry = store.load(name)
        if entry is None:
            continue
        if entry.refusal is not None:
            return Slot(None, entry.refusal)
        try:
            with _current(key.device):
                return Slot(load_plan(key.spec, key.device, str(entry.engine), entry.blob))
        except Exception as error:  # native code of others: whatever is wrong with it, we compile
            store.discard(name, f"cuDNN cannot load it: {' '.join(str(error).split())}")
    _tell_of_missing_plan(key)
    return None


def _tell_of_missing_plan(key: PlanKey) -> None:
    """Says once that plans compiled ahead of time are not the ones that are called for."""
    ahead = [str(store) for store in stores() if store.read_only]
    if ahead and not _told:
        _told.append(key)
        logger.warning(
            "%s: no plan for %s on %s, workspace limit %s, cuDNN %s, frontend %s; such plans are "
            "compiled as %s says (`cudnn-mha cache list --dir` shows what is there)",
            ", ".join(ahead),
            key.spec,
            key.device.name,
            key.workspace_limit,
            config.version_text(key.cudnn_version),
            key.frontend_version,
            config.BUILD,
        )


_told: list[PlanKey] = []


def _save(key: PlanKey, slot: Slot) -> None:
    for store in stores():
        if store.read_only:
            continue
        try:
            entry = stored(key, slot)
        except Exception as error:  # the plan works all the same
            logger.warning("a plan cannot be kept: %s", " ".join(str(error).split()))
            return
        store.save(entry)


class _Background:
    """Compiles on threads of its own what callers will not wait for."""

    THREADS = 2

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[PlanKey | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._wanted: set[PlanKey] = set()
        self._errors: dict[PlanKey, Exception] = {}

    def want(self, key: PlanKey) -> None:
        """Has the key built, once.

        Raises:
            Exception: what went wrong when it was tried before; the next call tries again.
        """
        with self._lock:
            error = self._errors.pop(key, None)
            if error is not None:
                raise error
            if key in self._wanted:
                return
            self._wanted.add(key)
            self._queue.put(key)
            if len(self._threads) < self.THREADS:
                # Daemons: the interpreter would wait for others before it asks us to stop.
                thread = threading.Thread(target=self._work, name="cudnn_mha build", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        while (key := self._queue.get()) is not None:
            error = None
            try:
                plans.get_or_build(key)
            except Exception as raised:
                error = raised
            with self._lock:
                self._wanted.discard(key)
                if error is not None:
                    self._errors[key] = error

    def stop(self) -> None:
        """Waits for what is being built and drops the rest."""
        with self._lock:
            threads, self._threads = self._threads, []
            with contextlib.suppress(queue.Empty):
                while (key := self._queue.get_nowait()) is not None:
                    self._wanted.discard(key)
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()


background = _Background()
runtime.on_exit(background.stop)


def stored(key: PlanKey, slot: Slot) -> Entry:
    """A slot as a file has it."""
    if slot.plan is None:
        return Entry(key.to_dict(), refusal=slot.refusal)
    plan = slot.plan
    return Entry(key.to_dict(), plan.engine, plan.workspace, None, plan.to_bytes())


def _build(spec: AttentionSpec, device: Device, workspace_limit: int | None) -> Plan:
    make = tuned_plan if config.settings().autotune else compile_plan
    with _current(device):
        return make(spec, device, workspace_limit)


def _current(device: Device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current one: cuDNN's handles work on no other."""
    return contextlib.nullcontext() if device.described else torch.cuda.device(device.index)


plans = PlanCache(build=_build, load=_load, save=_save)
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
        runtime.plan_environment(),
    )


def cache_info() -> CacheInfo:
    """Counters of the plan cache."""
    return plans.cache_info()


def cache_clear() -> None:
    """Drops every plan and remembered refusal, and sets the counters to zero."""
    plans.cache_clear()
