# SPDX-License-Identifier: Apache-2.0
"""A short training with and without the door, and whether every bit is the same: `train`.

For models that are called with a batch as keywords and return a loss, as those of transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.offload import offload_activations
from tests.support.waiting import SOON_S

NUM_STEPS = 4
Batch = Mapping[str, torch.Tensor]


@dataclass
class Training:
    """What a training came to; equal if every bit of it is.

    Attributes:
        losses: of each step, digests; gradients: of each step and parameter; weights: at the end.
        statistics: of each step, empty without the door; not compared.
        left_bytes: on the tiers once all writes have ended, those too that a use has overtaken and
            that may still run when a step ends; not compared.
    """

    losses: list[str] = field(default_factory=list)
    gradients: list[dict[str, str]] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    statistics: list[dict[str, int | float]] = field(default_factory=list, compare=False)
    left_bytes: int = field(default=0, compare=False)


def train(
    make_model: Callable[[], torch.nn.Module],
    batches: Iterable[Batch],
    directory: Path | None = None,
    *,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    wraps_first: bool = True,
    call: Callable[[torch.nn.Module, Batch], torch.Tensor] = lambda m, batch: m(**batch).loss,
    **settings: Any,
) -> Training:
    """Trains a new model, a step for each batch, with AdamW.

    Args:
        make_model: from a fixed seed.
        batches: as many as there are steps.
        directory: for activations; None: the door is not opened.
        wrap: what is trained of the model.
        wraps_first: the door gets that; else the model, before it is wrapped.
        call: a forward pass, to its loss.
        settings: of `offload_activations`; by default storages of 4 KiB and more move.
    """
    torch.manual_seed(5)
    model = make_model()
    wrapped = wrap(model) if wraps_first else model
    result, offload = Training(), contextlib.nullcontext()
    if directory is not None:
        offload = offload_activations(wrapped, directory, **{"min_bytes": "4KiB", **settings})
    wrapped = wrapped if wraps_first else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(6)  # of dropout
    with offload as handle:
        for batch in batches:
            loss = call(wrapped, batch)
            loss.backward()
            result.losses.append(digest(loss))
            result.gradients.append(gradients_of(model))
            if handle is not None:
                result.statistics.append(handle.statistics)
            optimizer.step()
            optimizer.zero_grad()
        del loss  # and its graph
        if handle is not None and handle.engine is not None:
            assert handle.engine.wait_for_writes(SOON_S)
            result.left_bytes = sum(tier.used_bytes for tier in handle.engine.tiers.values())
    result.weights = {name: digest(one) for name, one in model.named_parameters()}
    return result


def gradients_of(model: torch.nn.Module) -> dict[str, str]:
    """Digests of the gradients that are there, by the parameters' names."""
    return {name: digest(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def digest(tensor: torch.Tensor) -> str:
    """A few characters that differ if any bit does; of a DTensor, of this rank's part."""
    local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
    content = local.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(local.shape)} {hashlib.sha256(content).hexdigest()[:12]}"
