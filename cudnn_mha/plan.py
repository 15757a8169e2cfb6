"""A compiled cuDNN graph: what it needs, and how to run it."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cudnn_mha import runtime
from cudnn_mha.checks import Reason
from cudnn_mha.devices import Device
from cudnn_mha.graph_builder import Uid, constants, operands, propose_plans
from cudnn_mha.spec import AttentionSpec

_DTYPES = {"int32": torch.int32, "float32": torch.float32}


class Refused(Exception):
    """cuDNN has no plan for a spec."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Plan:
    """A compiled plan for one spec on one device.

    Attributes:
        spec: what it computes.
        device: what it was built for.
        engine: cuDNN's name for the engine and its knobs.
        workspace: bytes of scratch device memory that one run needs.
        takes: the operands that a run is given, in this order.
    """

    def __init__(
        self, spec: AttentionSpec, device: Device, graph: Any, engine: str, index: int = -1
    ) -> None:
        self.spec = spec
        self.device = device
        self.engine = engine
        self.workspace = int(graph.get_workspace_size())
        self._graph = graph
        # The frontend's cheapest way to run a plan: addresses in ascending order of their ids.
        lowered = graph._lowered_graph
        lowered._prepare_variant_pack_template()
        ids = tuple(lowered._get_variant_pack_uids_sorted())
        if ids != operands(spec):
            raise RuntimeError(f"the graph takes operands {ids}, expected {operands(spec)}")
        self._execute: Callable[..., None] = lowered._execute_with_raw_ptrs
        self._cpp_index = index
        self._pack = struct.Struct(f"{len(ids)}Q").pack_into
        self._count = len(ids)
        self._constants = self._make_constants()
        self.takes = tuple(Uid(uid) for uid in ids if uid not in constants(spec))
        self._own = [(ids.index(uid), t.data_ptr()) for uid, t in self._constants.items()]
        _alive.add(self)

    def _make_constants(self) -> dict[int, torch.Tensor]:
        """The operands that never change, made once."""
        wanted = constants(self.spec)
        if self.device.described or not wanted:
            return {}

        def make() -> dict[int, torch.Tensor]:
            device = f"cuda:{self.device.index}"
            made = {
                uid: torch.full(layout.shape, value, dtype=_DTYPES[layout.dtype], device=device)
                for uid, (layout, value) in wanted.items()
            }
            # Any stream may run the plan, and none of them knows the stream that filled these.
            torch.cuda.current_stream(self.device.index).synchronize()
            return made

        return runtime.outside_pools(make)

    def to_bytes(self) -> bytes:
        """The plan for another process: see `load_plan`."""
        return bytes(self._graph.serialize())

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Runs the plan on the raw CUDA ``stream``; its device must be the current one.

        Args:
            addresses: device addresses of the operands in the order of `operands`, without the
                `constants`, which the plan keeps itself.
            stream: raw stream of the plan's device.

        Raises:
            torch.OutOfMemoryError: the workspace cannot be allocated.
        """
        if self._own:
            runtime.keep_for_captures(self)
            addresses = list(addresses)
            for at, address in self._own:
                addresses.insert(at, address)
        assert self.device.index is not None
        lease = runtime.lease(self.device.index, stream)
        self._pack(lease.buffer, 0, *addresses)
        if not self.workspace:
            self._execute(lease.address, self._count, 0, lease.backend, self._cpp_index)
            return
        # Freed at once: the allocator gives the memory only to later work of the same stream.
        workspace = runtime.allocate(self.workspace, stream)
        try:
            self._execute(lease.address, self._count, workspace, lease.backend, self._cpp_index)
        finally:
            runtime.free(workspace)


_alive: weakref.WeakSet[Plan] = weakref.WeakSet()


def _let_go() -> None:
    """Drops the frontend's objects, also of plans that an output in a global still leads to."""
    for plan in tuple(_alive):
        plan._graph = plan._execute = None  # type: ignore[assignment]


runtime.on_exit(_let_go)


def compile_plan(spec: AttentionSpec, device: Device, workspace_limit: int | None = None) -> Plan:
    """The first plan in cuDNN's heuristic order that builds.

    Args:
        spec: what to compute.
        device: what to build for.
        workspace_limit: most bytes of workspace that a plan may need; None for no limit.

    Raises:
        Refused: cuDNN has no plan for the spec, or none within the limit.
    """
    return next(compile_plans(spec, device, workspace_limit))


def compile_plans(
    spec: AttentionSpec, device: Device, workspace_limit: int | None = None
) -> Iterator[Plan]:
    """The plans that build, in cuDNN's heuristic order, each on a graph of its own.

    Args:
        spec, device, workspace_limit: as for `compile_plan`.

    Raises:
        Refused: there is none.
    """
    unsupported = runtime.library().cudnnGraphNotSupportedError
    failures = []
    needed = []
    found = index = 0
    graph = _proposed(spec, device)
    while index < len(graph.plans):
        candidate = graph.plans[index]
        name = str(graph.get_plan_name_at_index(index))
        index += 1
        if candidate.cpp_index is None:
            continue  # an engine of the frontend's own, which brings its own compiler
        try:
            graph.build_plan_at_index(index - 1)
        except unsupported as error:
            failures.append(f"{name}: {_words(error)}")
            continue
        workspace = int(graph.get_workspace_size())
        if workspace_limit is not None and workspace > workspace_limit:
            needed.append(workspace)
            continue
        found += 1
        yield Plan(spec, device, graph, name, candidate.cpp_index)
        graph = _proposed(spec, device)  # a graph runs and stores the plan that was built last
    if found:
        return
    if needed:
        raise Refused(
            Reason(
                "workspace_limit",
                f"every plan needs more workspace than workspace_limit = {workspace_limit} bytes, "
                f"the least {min(needed)}; raise the limit",
            )
        )
    detail = "; ".join(failures) or "it proposed none"
    raise Refused(Reason("cudnn", f"no plan of cuDNN's builds: {detail}"))


def _proposed(spec: AttentionSpec, device: Device) -> Any:
    try:
        return propose_plans(spec, device)
    except runtime.library().cudnnGraphNotSupportedError as error:
        raise Refused(Reason("cudnn", _words(error))) from None


def load_plan(spec: AttentionSpec, device: Device, engine: str, data: bytes) -> Plan:
    """The plan that `Plan.to_bytes` wrote down, for the same spec and kind of device.

    The bytes hold native code: they must come from somebody who may run code here.

    Raises:
        Exception: of any kind that cuDNN's frontend raises for bytes that it cannot use.
    """
    cudnn = runtime.library()
    # Older frontends take numbers only, newer ones bytes too.
    content: Any = data if runtime.frontend_at_least(1, 32) else list(data)
    if device.index is None:
        properties = cudnn.create_device_properties(device.properties)
        graph = cudnn.pygraph(device_property=properties, sm_version=device.sm)
        graph.deserialize(content)
    else:
        handle = runtime.lease(device.index, runtime.current_stream(device.index)).handle
        graph = cudnn.pygraph(handle=handle)
        graph.deserialize(handle, content)
    return Plan(spec, device, graph, engine)


def _words(error: Exception) -> str:
    """cuDNN's own words, on one line."""
    return "cuDNN: " + " ".join(str(error).split())
