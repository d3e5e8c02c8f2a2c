# SPDX-License-Identifier: Apache-2.0
"""Where a transformer layer's attention ends and its MLP begins: `LayerDivision`.

`LayerHooks` asks, where a policy wants it. The tensor that comes to the norm before the MLP is the
middle: what leads to it from the layer's inputs is attention, what leads from it to the outputs is
the MLP. The middle itself is saved by that norm, so it is the MLP's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron.offload.saved.autograd_graph import node_of

ATTENTION, MLP = "attention", "mlp"


class LayerDivision:
    """Tells where the running layer's attention ends and its MLP begins.

    Args:
        layers: with a module `pre_mlp_layernorm`, or they are not divided.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._reached: Callable[[torch.Tensor], None] | None = None
        # Forward pre-hooks: they leave the results alone, and nothing of them stays in the graph.
        self._handles = [
            norm.register_forward_pre_hook(self._hook, with_kwargs=True)
            for layer in layers
            if isinstance(norm := getattr(layer, "pre_mlp_layernorm", None), torch.nn.Module)
        ]

    @contextlib.contextmanager
    def watching(self, reached: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """A context around a layer's forward: calls `reached` once, with the tensor in the middle.

        Not where autograd does not know that tensor: then there is nothing to divide at.
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

    def _hook(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        reached = self._reached
        if reached is None or not tensors or node_of(tensors[0]) is None:
            return
        self._reached = None
        reached(tensors[0])
