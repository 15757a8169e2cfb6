"""cuDNN attention as an attention backend of Hugging Face diffusers, called ``"cudnn_mha"``.

.. code-block:: python

    from cudnn_mha.integrations import diffusers

    diffusers.register()
    pipe.transformer.set_attention_backend("cudnn_mha")

After `register` the name works wherever diffusers takes one: ``model.set_attention_backend``,
``with attention_backend("cudnn_mha")``, and ``DIFFUSERS_ATTN_BACKEND=cudnn_mha``, which diffusers
reads when it loads its first model: there `register` has to come before.

diffusers' names of backends are a closed enumeration, and its registry is private. The
enumeration gets one member more, in place, since diffusers' modules hold the class itself; the
registry is used through its own decorator. All that is relied on is looked at before anything is
changed.

The models whose attention goes through diffusers' dispatcher follow: transformers and the newer
autoencoders. UNets and older autoencoders call PyTorch's function, which `cudnn_mha.enable` serves.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from cudnn_mha.functional import cudnn_sdpa

try:
    import diffusers
    from diffusers.utils import constants
except ModuleNotFoundError as error:
    if error.name != "diffusers":
        raise
    raise ImportError(
        "cudnn_mha.integrations.diffusers needs diffusers: pip install 'diffusers>=0.42'"
    ) from error

NAME = "cudnn_mha"
"""What diffusers calls the backend."""

MIN_DIFFUSERS = "0.42.0"
"""The oldest release whose dispatcher is the known one."""

_MEMBER = "CUDNN_MHA"


@dataclass(frozen=True)
class _Registered:
    """What there is to undo: the member, and the backend that was active before it."""

    member: Any
    active: Any


_registered: _Registered | None = None


def register() -> None:
    """Makes the backend known to diffusers; a second call changes nothing.

    Where ``DIFFUSERS_ATTN_BACKEND`` names it, it is the active one from then on.

    Raises:
        RuntimeError: the dispatcher of this release of diffusers is not the known one; it says
            what differs, and nothing was changed.
    """
    global _registered
    if _registered is not None:
        return
    if torch.torch_version.TorchVersion(diffusers.__version__) < MIN_DIFFUSERS:
        _refuse(f"it is older than {MIN_DIFFUSERS}", f"pip install 'diffusers>={MIN_DIFFUSERS}'")
    dispatch = _dispatcher()
    unknown = _unknown(dispatch)
    if unknown:
        _refuse("; ".join(unknown), "install a release that this version of cudnn_mha knows")
    registry = dispatch._AttentionBackendRegistry
    member = _add_member(dispatch.AttentionBackendName)
    # The checks are those of diffusers' native backend: what cuDNN cannot serve PyTorch computes.
    constraints = [dispatch._check_device, dispatch._check_shape]
    registry.register(member, constraints=constraints)(attention)
    _registered = _Registered(member, registry._active_backend)
    if constants.DIFFUSERS_ATTN_BACKEND == NAME:
        registry._active_backend = member


def unregister() -> None:
    """Takes the backend out of diffusers again, which is then as `register` found it.

    Models that were set to it by name keep it: reset these with ``model.reset_attention_backend()``
    or set another. Without `register` before, this does nothing.
    """
    global _registered
    if _registered is None:
        return
    member, active = _registered.member, _registered.active
    dispatch = _dispatcher()
    registry = dispatch._AttentionBackendRegistry
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        del table[member]
    if registry._active_backend is member:
        registry._active_backend = active
    _remove_member(dispatch.AttentionBackendName, member)
    _registered = None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cudnn_sdpa` with the arguments and the layout of a backend of diffusers.

    Args:
        query: ``(B, Sq, Hq, Dqk)``; cuDNN reads it where it is, whatever its strides.
        key: ``(B, Skv, Hk, Dqk)``.
        value: ``(B, Skv, Hv, Dv)``.
        attn_mask: as for `cudnn_sdpa`, or ``(B, Skv)``: one for all queries of a sequence.
        dropout_p, is_causal, scale, enable_gqa: as for `cudnn_sdpa`.
        return_lse: also return the log-sum-exp.

    Returns:
        ``(B, Sq, Hq, Dv)``, laid out as the query is; with ``return_lse`` the pair of it and the
        log-sum-exp, natural logarithm, float32, ``(B, Sq, Hq)``.

    Raises:
        ValueError: context parallelism is asked for.
    """
    if _parallel_config is not None:
        raise ValueError(
            f"the attention backend {NAME!r} has no context parallelism, but _parallel_config is "
            "given; set '_native_cudnn' for this model and call cudnn_mha.enable(), which serves it"
        )
    # The same test, in the same order, as that of diffusers' native backend.
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    result = cudnn_sdpa(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse=return_lse,  # type: ignore[call-overload]
    )
    if not return_lse:
        output: Tensor = result
        return output.transpose(1, 2)
    output, lse = result
    return output.transpose(1, 2), lse.transpose(1, 2)


def _dispatcher() -> Any:
    """diffusers' dispatcher, which must not see our name in the environment before it is known."""
    wanted = constants.DIFFUSERS_ATTN_BACKEND
    if wanted == NAME:
        constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        return importlib.import_module("diffusers.models.attention_dispatch")
    finally:
        constants.DIFFUSERS_ATTN_BACKEND = wanted


def _unknown(dispatch: Any) -> list[str]:
    """What of the dispatcher is not as this module relies on it, in words."""
    names = getattr(dispatch, "AttentionBackendName", None)
    registry: Any = getattr(dispatch, "_AttentionBackendRegistry", None)
    if not (isinstance(names, type) and issubclass(names, str) and issubclass(names, Enum)):
        return ["AttentionBackendName is not an enumeration of strings"]
    found = [
        f"_AttentionBackendRegistry.{name} is not a dictionary"
        for name in ("_backends", "_constraints", "_supported_arg_names")
        if not isinstance(getattr(registry, name, None), dict)
    ]
    found += [
        f"{name} is missing"
        for name in ("_check_device", "_check_shape")
        if name not in vars(dispatch)
    ]
    if not isinstance(getattr(registry, "_active_backend", None), names):
        found.append("_AttentionBackendRegistry._active_backend is not one of the names")
    decorator = getattr(registry, "register", None)
    if decorator is None or not {"backend", "constraints"} <= _parameters(decorator):
        found.append("_AttentionBackendRegistry.register takes other arguments")
    if found:
        return found
    if NAME in names._value2member_map_ or _MEMBER in names.__members__:
        return [f"it has a backend called {NAME!r} already"]
    # diffusers leaves out what a backend does not take: an argument that is new to us would go
    # missing without a word.
    native = registry._supported_arg_names.get(names("native"), set())
    new = sorted(native ^ _parameters(attention))
    if new:
        found.append(f"its backends take other arguments: {', '.join(new)}")
    return found


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _refuse(what: str, remedy: str) -> None:
    raise RuntimeError(
        f"cuDNN attention cannot be registered in diffusers {diffusers.__version__}: {what}; "
        f"{remedy}, or call cudnn_mha.enable(), which serves PyTorch's attention under any release"
    )


def _add_member(names: Any) -> Any:
    member = str.__new__(names, NAME)
    member._name_, member._value_ = _MEMBER, NAME
    member.__objclass__ = names
    member._sort_order_ = len(names._member_names_)
    setattr(names, _MEMBER, member)  # before it is a member, which could not be set
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = member
    names._value2member_map_[NAME] = member
    return member


def _remove_member(names: Any, member: Any) -> None:
    del names._value2member_map_[NAME]
    del names._member_map_[_MEMBER]
    names._member_names_.remove(_MEMBER)
    delattr(names, _MEMBER)
