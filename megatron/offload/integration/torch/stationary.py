# SPDX-License-Identifier: Apache-2.0
"""What of a model never moves: `stationary_tensors`, `unsharded_tensors`.

Most are excluded between steps. Sharded training makes others in the middle of one: FSDP gathers
the parameters of a module before its forward into buffers that it frees behind it, by resizing
their storage while views of it exist. A tier that moved such a view would read freed memory.

Note [Views of parameters]
What a linear layer saves is mostly a view of its weight: a plain tensor, whose base is the
parameter. The cache knows those by their base. A view that was made without gradients, or of
`parameter.data`, has no such base; it is known by its storage, which is why storages are excluded
as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy


def modules_in(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Models and all modules within them, each once.

    A step asks for them: `torch.nn.Module.modules` makes up the name of each as well, in a chain of
    generators, which takes several times as long.
    """
    found: dict[torch.nn.Module, None] = {}
    waiting = list(models)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting.extend(one for one in module._modules.values() if one is not None)
    return list(found)


def stationary_tensors(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters, their gradients and buffers; of a DTensor the local part.

    Args:
        modules: with those within them, as `modules_in` has them.
    """
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is None or has_no_shape(parameter):
                continue
            yield _local(parameter)
            # `functional_call` puts results of others there, and torch warns of their `.grad`.
            if parameter.is_leaf and parameter.grad is not None:
                yield _local(parameter.grad)
        for buffer in module._buffers.values():
            if buffer is not None and not has_no_shape(buffer):
                yield _local(buffer)


def has_no_shape(tensor: torch.Tensor) -> bool:
    """Whether a lazy module gives it one, and memory, in its first call."""
    return bool(is_lazy(tensor))


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether FSDP gathers parameters for this module's forward."""
    # Asked of the type: where a module lacks an attribute, to ask takes it microseconds.
    return hasattr(type(module), "_get_fsdp_state") or hasattr(type(module), "summon_full_params")


def fsdp2_state(module: torch.nn.Module) -> Any:
    """What FSDP2 keeps of a module that `fully_shard` was called with; None: it was not."""
    any_module: Any = module
    has_state = hasattr(type(module), "_get_fsdp_state")
    return any_module._get_fsdp_state() if has_state else None


def parameter_groups(state: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together, of what `fsdp2_state` gave."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.10 has one group
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def unsharded_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that FSDP gathers a module's parameters into, as far as there are any yet.

    Args:
        module: see `is_sharded`.
    """
    state = fsdp2_state(module)
    if state is not None:
        for parameter in (one for group in parameter_groups(state) for one in group.fsdp_params):
            yield from parameter.all_gather_outputs
            if hasattr(parameter, "_unsharded_param"):
                yield _local(parameter._unsharded_param)
        return
    handle = getattr(module, "_handle", None)  # FSDP1
    if handle is not None:
        for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
            flat = getattr(handle.flat_param, name, None)
            if isinstance(flat, torch.Tensor):
                yield flat


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, torch.Tensor) else tensor
