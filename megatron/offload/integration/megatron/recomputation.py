# SPDX-License-Identifier: Apache-2.0
"""Runs a layer or a part of it so that only its inputs are kept: `recomputed`, `recomputing`.

`LayerHooks` calls it, where a policy says so. Megatron's own checkpoint does the work and restores
the states of all random number generators. What runs again in backward is not captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.random import checkpoint

from megatron.offload.integration.megatron.layer_split import ATTENTION, MLP
from megatron.offload.integration.own_attributes import replaced

Function = Callable[..., Any]

# What `TransformerLayer.forward` calls one after the other. The tensor between them is the middle
# of `layer_split.py`; a residual connection lies inside of one or the other, so gradients are
# summed in the same order as without recomputation.
_METHODS = {ATTENTION: "_forward_attention", MLP: "_forward_mlp"}


def recomputed(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function so that it saves its inputs only and runs again in backward.

    Megatron's checkpoint takes tensors by position only.
    """
    values, number, names = [*args, *kwargs.values()], len(args), list(kwargs)
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:  # refers to no tensor: it lives until backward
        present = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            present[place] = tensor
        return function(*present[:number], **dict(zip(names, present[number:], strict=True)))

    tensors = [values[place] for place in places]
    for place in places:
        values[place] = None  # what is kept is kept by the checkpoint alone
    return checkpoint(run, False, *tensors)


def has_parts(layer: torch.nn.Module) -> bool:
    """Whether a layer's attention and MLP can be recomputed one without the other."""
    return all(callable(getattr(layer, name, None)) for name in _METHODS.values())


@contextlib.contextmanager
def recomputing(
    layer: torch.nn.Module, parts: Iterable[str], noted: Callable[[str, Function], Function]
) -> Iterator[None]:
    """A context around a layer's forward in which some of its parts are recomputed in backward.

    Args:
        layer: see `has_parts`.
        parts: the parts.
        noted: gets the name of a part and its function, and gives what is called in its place,
            now and in backward.
    """
    with contextlib.ExitStack() as stack:
        for part in parts:
            name = _METHODS[part]
            again = _recomputing(noted(part, getattr(layer, name)))
            stack.enter_context(replaced(layer, **{name: again}))
        yield


def _recomputing(function: Function) -> Function:
    return lambda *args, **kwargs: recomputed(function, args, kwargs)
