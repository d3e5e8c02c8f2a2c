# SPDX-License-Identifier: Apache-2.0
"""Small models with frozen parts, and trainings of them with and without a cache of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.offload import cache_frozen

VOCABULARY, TOKENS, BATCH = 64, 24, 3
Batch = dict[str, Any]


class Trained(NamedTuple):
    """What came of a training: losses, weights, and rows that were found in each epoch."""

    losses: list[float]
    weights: torch.Tensor
    hits: list[int]

    def same_as(self, other: Trained) -> bool:
        """Bit for bit."""
        return self.losses == other.losses and torch.equal(self.weights, other.weights)


def llama(*, frozen: int = 3, layers: int = 4, **settings: Any) -> Any:
    """A Llama with its class's defaults, of which the first layers are frozen."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * TOKENS,
        **settings,
    )
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:frozen]:
        layer.requires_grad_(False)
    return model.train()


def rows_of_text(num_rows: int = 2 * BATCH) -> Batch:
    """Rows of tokens, each padded: a batch without padding has no mask, and is of another kind."""
    tokens = torch.randint(
        0, VOCABULARY, (num_rows, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(tokens)
    for row in range(num_rows):
        mask[row, TOKENS - 1 - row % 4 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def train(
    model: torch.nn.Module,
    rows: Batch,
    directory: Path | None,
    *,
    epochs: int = 2,
    shuffled: bool = True,
    batch: int = BATCH,
    loss_of: Callable[[Any], torch.Tensor] = lambda output: output.loss,
    **settings: Any,
) -> Trained:
    """Trains with the cache in a directory; None: without one."""
    features = None if directory is None else cache_frozen(model, directory, **settings)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)
    losses, hits = [], []
    num_rows = len(next(iter(rows.values())))
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch if shuffled else 0)
        for chosen in torch.randperm(num_rows, generator=generator).split(batch):
            loss = loss_of(model(**{name: one[chosen] for name, one in rows.items()}))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if features is not None:
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"] - sum(hits))
    if features is not None:
        features.close()
    weights = torch.cat([one.detach().flatten().double() for one in model.parameters()])
    return Trained(losses, weights, hits)


def hits_of(model: torch.nn.Module, batches: Sequence[Batch], directory: Path) -> list[int]:
    """Rows of each forward pass that were found; what was computed is stored before the next."""
    found = []
    with cache_frozen(model, directory) as features:
        for batch in batches:
            model(**batch)
            features.store.wait_for_writes()
            found.append(features.statistics["hit_rows"] - sum(found))
    return found
