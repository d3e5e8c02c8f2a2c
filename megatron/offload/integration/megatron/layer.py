# SPDX-License-Identifier: Apache-2.0
"""Captures what each transformer layer saved, at the end of its forward: `wrap_layers`.

`install` calls it. The class's `forward` is replaced, so subclasses that call it are covered; no
Megatron code is copied. Why at the layer's end: Note [Why per-node capture] in `saved/graph.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.offload.engine import OffloadEngine


def wrap_layers(
    engine: OffloadEngine, model_chunks: Sequence[torch.nn.Module]
) -> Callable[[], None]:
    """Makes every `TransformerLayer.forward` hand what it saved to the engine.

    Returns:
        A function that restores Megatron's own `forward`.
    """
    names = layer_names(model_chunks)
    original = TransformerLayer.forward

    @functools.wraps(original)
    def forward(self: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # No tape: not inside a forward pass that backward will follow, e.g. a recomputation.
        if torch.is_grad_enabled() and engine.tape is not None and self in names:
            engine.capture(
                dataclasses.replace(engine.scope, layer=names[self]),
                outputs=_tensors(result),
                inputs=[*_tensors(args), *_tensors(kwargs.values())],
            )
        return result

    TransformerLayer.forward = forward

    def restore() -> None:
        TransformerLayer.forward = original

    return restore


def layer_names(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """`decoder.7` for each layer: its block's path and its global 1-based number.

    The block is part of the name because T5's encoder and decoder layers share their numbers.
    """
    names: dict[torch.nn.Module, str] = {}
    for chunk in model_chunks:
        for path, block in chunk.named_modules():
            if isinstance(block, TransformerBlock):
                for layer in block.layers:
                    names[layer] = f"{path.rpartition('.')[2]}.{layer.layer_number}"
    return names


def _tensors(values: Any) -> list[torch.Tensor]:
    values = (values,) if isinstance(values, torch.Tensor) else values
    return [value for value in values if isinstance(value, torch.Tensor)]
