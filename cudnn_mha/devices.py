"""Facts of the GPU that a plan is built for: one of this machine, or a described one.

A described GPU is a JSON profile of the properties that cuDNN reads off a card. cuDNN plans,
refuses and compiles for it on any machine, also on one without a GPU.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from importlib import resources


@dataclass(frozen=True)
class Device:
    """The GPU that a plan is built for.

    Attributes:
        name: the driver's name for it, such as ``NVIDIA H200``.
        sm: compute capability as one number, 90 for 9.0.
        multiprocessors: number of streaming multiprocessors.
        memory: bytes of device memory.
        index: CUDA device index, or None for a described GPU.
        properties: a described GPU's profile, JSON text; empty for a real one.
    """

    name: str
    sm: int
    multiprocessors: int
    memory: int
    index: int | None = None
    properties: str = field(default="", repr=False)

    @property
    def described(self) -> bool:
        return self.index is None

    def __str__(self) -> str:
        where = "described" if self.described else f"cuda:{self.index}"
        return f"{self.name} (sm_{self.sm}, {where})"


def profile_names() -> list[str]:
    """Names of the GPU profiles that come with the package."""
    folder = resources.files("cudnn_mha") / "profiles"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name[0] != "_")


@functools.cache
def described(name: str) -> Device:
    """The described GPU of that name.

    Raises:
        ValueError: there is no such profile; the message lists those there are.
    """
    given, name = name, name.lower()
    if name not in profile_names():
        known = ", ".join(profile_names())
        raise ValueError(f"gpu must be one of {known}, got {given!r}")
    text = (resources.files("cudnn_mha") / "profiles" / f"{name}.json").read_text()
    facts = json.loads(text)
    return Device(
        name=facts["deviceName"],
        sm=facts["deviceVer"] // 10,
        multiprocessors=facts["multiProcessorCount"],
        memory=facts["totalGlobalMem"],
        properties=text,
    )


@functools.cache
def cuda(index: int) -> Device:
    """The GPU of this machine with that CUDA index."""
    import torch

    facts = torch.cuda.get_device_properties(index)
    return Device(
        name=facts.name,
        sm=facts.major * 10 + facts.minor,
        multiprocessors=facts.multi_processor_count,
        memory=facts.total_memory,
        index=index,
    )
