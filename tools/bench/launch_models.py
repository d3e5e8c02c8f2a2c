# SPDX-License-Identifier: Apache-2.0
"""Models of short operations, which `launch.py` trains: `Model`, `Llama`."""

from __future__ import annotations

import argparse

import torch


class Block(torch.nn.Module):
    """A transformer layer, pre-norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = (torch.nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.wide, self.narrow = (
            torch.nn.Linear(hidden, 4 * hidden),
            torch.nn.Linear(4 * hidden, hidden),
        )
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape [batch, sequence, hidden], as is the result."""
        heads = [
            one.unflatten(-1, (-1, 16)).transpose(1, 2)
            for one in self.qkv(self.before_attention(x)).split(self.hidden, dim=-1)
        ]
        context = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.before_mlp(x))))


class Model(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(args.hidden_size) for _ in range(args.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape [batch, sequence, hidden], as is the result."""
        for layer in self.layers:
            x = layer(x)
        return x

    @staticmethod
    def inputs(args: argparse.Namespace) -> torch.Tensor:
        """Of shape [batch, sequence, hidden]."""
        return torch.randn(args.batch, args.sequence, args.hidden_size)


class Llama(torch.nn.Module):
    """transformers' Llama in bf16, without its head and with its defaults."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            vocab_size=512,
            hidden_size=args.hidden_size,
            intermediate_size=7 * args.hidden_size // 2,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden_size // 16,
            num_key_value_heads=args.hidden_size // 64,
            max_position_embeddings=args.sequence,
        )
        self.model = LlamaModel(config).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token numbers of shape [batch, sequence]; hidden states of one dimension more."""
        return self.model(input_ids=x).last_hidden_state

    @staticmethod
    def inputs(args: argparse.Namespace) -> torch.Tensor:
        """Of shape [batch, sequence]."""
        return torch.randint(512, (args.batch, args.sequence))
