# SPDX-License-Identifier: Apache-2.0
"""Where in its forward a transformer layer can be divided: `LayerDivision`.

`LayerHooks` calls it, where a policy or a flag wants layers divided. The tensor that comes to the
norm before the MLP is the middle: what leads to it from the layer's inputs is attention, what leads
from it to the outputs is the MLP. The middle itself is saved by that norm, so it is the MLP's. Each
module with parameters, and core attention, begins another operation. It captures nothing itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron.offload.activations.capture.hooks import PLAIN_TORCH
from megatron.offload.activations.saved.autograd_graph import node_of
from megatron.offload.integration.hook import Hook

ATTENTION, MLP = "attention", "mlp"

_CORE_ATTENTION = "core_attention"
# Experts may run on a stream of their own, beside other operations of the layer.
_UNDIVIDED = frozenset({"experts", "shared_experts", "router"})
# Of --recompute-modules, those that free a result before the layer's end.
_DISCARDING = frozenset({"layernorm", "moe_act", "mla_up_proj"})

# What is told of a place in a running layer: the tensors that come to it from what ran before, and
# whether it is the middle.
Reached = Callable[[list[torch.Tensor], bool], None]


class LayerDivision:
    """Tells where the running layer's attention ends and its MLP begins, and its operations.

    Args:
        layers: with a module `pre_mlp_layernorm`, or they have no middle.
        operations: tell of the layer's operations as well.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], *, operations: bool = False) -> None:
        self._reached: Reached | None = None
        # Forward pre-hooks: they leave the results alone, and nothing of them stays in the graph.
        self._handles = [
            module.register_forward_pre_hook(
                Hook(functools.partial(self._hook, is_middle)), with_kwargs=True
            )
            for layer in layers
            for module, is_middle in _places_in(layer, operations)
        ]

    @contextlib.contextmanager
    def watching(self, reached: Reached) -> Iterator[None]:
        """A context around a layer's forward: calls `reached` at each place that it comes to.

        Not where autograd does not know the tensors there: then there is nothing to divide at.
        """
        outer, self._reached = self._reached, reached
        try:
            yield
        finally:
            self._reached = outer

    def close(self) -> None:
        """Takes the hooks off the model."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(
        self, is_middle: bool, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # A part that runs again computes without gradients now; what it begins with is the middle.
        if self._reached is None or not (is_middle or torch.is_grad_enabled()):
            return
        values = (*args, *kwargs.values())
        with PLAIN_TORCH():  # a mode, such as the CPU runtime's, would see each look
            tensors = [t for t in values if isinstance(t, torch.Tensor) and node_of(t) is not None]
        if tensors:
            self._reached(tensors, is_middle)


def _places_in(layer: torch.nn.Module, operations: bool) -> Iterator[tuple[torch.nn.Module, bool]]:
    """The modules of a layer at which it can be divided, and whether that is its middle."""
    middle = getattr(layer, "pre_mlp_layernorm", None)
    if not isinstance(middle, torch.nn.Module):
        return
    yield middle, True
    if operations and not _discards(layer):
        for path, module in layer.named_modules():
            *outer, name = path.split(".")
            if module is middle or _CORE_ATTENTION in outer or {name, *outer} & _UNDIVIDED:
                continue
            if name == _CORE_ATTENTION or (module._parameters and not module._modules):
                yield module, False


def _discards(layer: torch.nn.Module) -> bool:
    """Whether Megatron's own selective recomputation frees results that are captured before."""
    config = getattr(layer, "config", None)
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    return is_selective and not _DISCARDING.isdisjoint(
        getattr(config, "recompute_modules", None) or ()
    )
