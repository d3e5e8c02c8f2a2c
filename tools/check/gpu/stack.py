# SPDX-License-Identifier: Apache-2.0
"""A stack of plain transformer layers whose saved bytes can be counted by hand: `Stack`.

The section `memory` trains it with and without an engine. Everything that a step
needs beside activations exists before it begins: input, a probe that makes a loss, all gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from check.gpu.settings import Size
from megatron.offload import OffloadEngine, Scope


class Layer(torch.nn.Module):
    """Attention and an MLP, each behind a norm and added to its input; no dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.num_heads = size.num_heads
        self.norm_1 = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.projection = torch.nn.Linear(hidden, hidden)
        self.norm_2 = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, shaped as `x`: [batch, sequence, hidden]."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Stack(torch.nn.Module):
    """The layers, with one input and one step for all who compare."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.size = size
        self.element_bytes = torch.empty(0, dtype=dtype).element_size()
        with device:
            self.layers = torch.nn.ModuleList(Layer(size) for _ in range(size.num_layers))
        self.to(dtype)
        shape = (size.micro_batch, size.seq_length, size.hidden)
        self.input = torch.randn(shape, dtype=dtype, device=device)
        self.probe = torch.randn(shape, dtype=dtype, device=device)
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, engine: OffloadEngine | None = None) -> None:
        """Forward and backward; gradients are added up."""
        if engine is None:
            self._loss(None).backward()
            return
        engine.exclude([*self.parameters(), self.input, self.probe])
        with engine.step():
            with engine.forward(Scope()) as save_order:
                loss = self._loss(engine)
            with engine.backward(save_order):
                loss.backward()

    def _loss(self, engine: OffloadEngine | None) -> torch.Tensor:
        x = self.input.detach().requires_grad_()  # a leaf: it stays where it is
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if engine is not None:
                engine.capture(Scope(layer=str(index)), outputs=[y], inputs=[x])
            x = y
        return (x * self.probe).sum(dtype=torch.float32)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one tensor of tokens x hidden."""
        return self.size.tokens * self.size.hidden * self.element_bytes

    def saved_terms(self) -> dict[str, int]:
        """What one layer saves for backward, in bytes."""
        unit, tokens = self.unit_bytes, self.size.tokens
        return {
            "input of both norms": 2 * unit,
            "output of both norms": 2 * unit,
            "q, k, v": 3 * unit,
            "output of attention": unit,
            "input and output of the activation function": 8 * unit,
            "statistics of both norms, log-sum-exp of attention (fp32)": (
                4 * tokens * 4 + tokens * self.size.num_heads * 4
            ),
        }

    @property
    def saved_bytes(self) -> int:
        """Bytes that all layers together save for backward."""
        return self.size.num_layers * sum(self.saved_terms().values())

    def bound_terms(self, inflight_bytes: int, min_bytes: int) -> dict[str, int]:
        """The most that a step with everything offloaded may take, in bytes, term by term."""
        unit, layer = self.unit_bytes, self.saved_terms()
        small = self.size.tokens * max(self.size.num_heads, 2) * 4
        kept = sum(layer.values()) - 16 * unit if small < min_bytes else 0
        return {
            "on their way to the tier": inflight_bytes,
            "read ahead of backward": max(inflight_bytes, 4 * unit),
            "what the layer that runs saves": sum(layer.values()),
            "gradients in a layer: of both sides of the activation function": 8 * unit,
            "gradients in a layer: of q, k, v, twice, as attention needs fp32": 6 * unit,
            "gradients in a layer: of its input and output": 3 * unit,
            "gradient of the largest weight": 4 * self.size.hidden**2 * self.element_bytes,
            "storages below the threshold, which stay": self.size.num_layers * kept,
        }


@contextlib.contextmanager
def opened(engine: OffloadEngine) -> Iterator[OffloadEngine]:
    """An engine as a context that closes it."""
    try:
        yield engine
    finally:
        engine.close()
