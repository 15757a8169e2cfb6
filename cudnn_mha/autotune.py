"""Times cuDNN's plans for a spec and keeps the fastest, instead of the first one that builds."""

from __future__ import annotations

import logging
import statistics

import torch
from torch import Tensor

from cudnn_mha import runtime
from cudnn_mha.devices import Device
from cudnn_mha.graph_builder import operand_layouts
from cudnn_mha.plan import Plan, compile_plan, compile_plans
from cudnn_mha.spec import AttentionSpec, TensorSpec

logger = logging.getLogger("cudnn_mha")

ROUNDS = 9
CALLS = 3

_DTYPES = {"int32": torch.int32, "int64": torch.int64}


def tuned_plan(spec: AttentionSpec, device: Device, workspace_limit: int | None = None) -> Plan:
    """The fastest plan for ``spec`` on random numbers; the first that builds where none can run.

    The plans take turns, in rounds, and their medians are compared: what disturbs the machine
    disturbs all of them.

    Args:
        spec: what to compute. Specs with lengths get their first plan: what they cost depends on
            the lengths.
        device: what to build for; a described one runs nothing.
        workspace_limit: most bytes of workspace that a plan may need; None for no limit.

    Raises:
        Refused: as `compile_plan` does.
    """
    if device.described or spec.lengths:
        return compile_plan(spec, device, workspace_limit)
    candidates = list(compile_plans(spec, device, workspace_limit))
    if len(candidates) == 1:
        return candidates[0]
    with torch.cuda.device(device.index):
        try:
            seconds = runtime.outside_pools(lambda: _times(spec, device, candidates))
        except torch.OutOfMemoryError:
            return candidates[0]
    best = min(candidates, key=lambda plan: seconds[plan.engine])
    logger.info(
        "autotuned %s: %s is the fastest of %d plans, %.2f times as fast as the first, %s",
        spec,
        best.engine,
        len(candidates),
        seconds[candidates[0].engine] / seconds[best.engine],
        candidates[0].engine,
    )
    return best


def _times(spec: AttentionSpec, device: Device, plans: list[Plan]) -> dict[str, float]:
    """Median milliseconds of each plan, by engine."""
    assert device.index is not None
    where = torch.device("cuda", device.index)
    torch.cuda.set_device(where)
    tensors = {uid: _filled(layout, where) for uid, layout in operand_layouts(spec).items()}
    stream = runtime.current_stream(device.index)

    def run(plan: Plan) -> None:
        plan.run([tensors[uid].data_ptr() for uid in plan.takes], stream)

    taken: dict[str, list[float]] = {plan.engine: [] for plan in plans}
    for plan in plans:
        run(plan)
    for _ in range(ROUNDS):
        for plan in plans:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                run(plan)
            end.record()
            end.synchronize()
            taken[plan.engine].append(start.elapsed_time(end))
    return {engine: statistics.median(times) for engine, times in taken.items()}


def _filled(layout: TensorSpec, device: torch.device) -> Tensor:
    """Memory for an operand, of small random numbers; zeros for whole ones."""
    if layout.dtype in _DTYPES:
        return torch.zeros(layout.extent, dtype=_DTYPES[layout.dtype], device=device)
    return torch.randn(layout.extent, device=device).to(getattr(torch, layout.dtype))
