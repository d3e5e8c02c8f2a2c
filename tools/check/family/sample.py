# SPDX-License-Identifier: Apache-2.0
"""A small model of a family with inputs with which it trains: `Sample`, found by `find_sample`."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING

from check.family.catalogue import Family
from check.family.configurations import small_configurations
from check.family.inputs import Batch, WayToCall, ways_to_call

_MOST_PARAMETERS = 8_000_000
_PLACES = (16, 4, 1)  # for a picture in a text, tried before an error tells the right number
_FEATURES = re.compile(r"features:? ?(\d+)")
_SEED = 1


class NotBuiltError(Exception):
    """A family has no small model that runs; the message says why."""


@dataclass(frozen=True)
class Sample:
    """A small model, as it is before its training, and its inputs.

    Attributes:
        family: of the model.
        way: how its configuration was made smaller.
        inputs: what it is called with.
        pristine: the model, of which every training takes a copy.
    """

    family: Family
    way: str
    inputs: WayToCall
    pristine: torch.nn.Module

    def model(self) -> torch.nn.Module:
        """A new model, always with the same weights."""
        return copy.deepcopy(self.pristine).train()

    def batches(self, number: int) -> list[Batch]:
        """The first batches, always the same."""
        return [self.inputs.draw(torch.Generator().manual_seed(n)) for n in range(number)]


def find_sample(family: Family, attention: str) -> Sample:
    """The first small model of a family that trains.

    Args:
        family: to be tried.
        attention: `eager` or `sdpa`.

    Raises:
        NotBuiltError: none does; says why the best one does not.
    """
    reasons: list[str] = []
    try:
        for way, config in small_configurations(CONFIG_MAPPING[family.name]):
            try:
                model = _built(family, config, attention)
                return Sample(family, way, _inputs_of(model, family), model)
            except Exception as error:
                reasons.append(in_a_line(error))
    except Exception as error:  # its class cannot be made
        reasons.append(in_a_line(error))
    raise NotBuiltError(next(iter(reasons), "no configuration of its class could be made"))


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss where it returns one, else a function of all of its outputs."""
    outputs = model(**batch)
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.mean()
    every = [one for one in _tensors(outputs) if one.requires_grad and one.is_floating_point()]
    if not every:
        raise NotBuiltError("no output of its forward pass wants a gradient")
    return torch.stack([one.float().square().mean() for one in every]).sum()


def in_a_line(error: BaseException) -> str:
    """An exception's type and message, shortened."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _built(family: Family, config: Any, attention: str) -> torch.nn.Module:
    kind: Any = getattr(transformers, family.model)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(copy.deepcopy(config)).parameters())
    if size > _MOST_PARAMETERS:
        raise NotBuiltError(f"its smallest model has {size / 1e6:.0f} million parameters")
    torch.manual_seed(_SEED)
    model: torch.nn.Module = kind._from_config(config, attn_implementation=attention)
    return model.float().train()


def _inputs_of(model: torch.nn.Module, family: Family) -> WayToCall:
    first_error: Exception | None = None
    tried: set[str] = set()
    places = [*_PLACES, 0]
    for _ in range(2):  # again with what errors have told
        for way in ways_to_call(model, family.kind, places):
            if way.name in tried:
                continue
            tried.add(way.name)
            try:
                _try(model, way)
                return way
            except Exception as error:
                first_error = first_error or error
                told = _FEATURES.search(str(error))
                if told and (number := int(told[1])) % 2 == 0 and 0 < number <= 512:
                    places[:0] = [number // 2] if number // 2 not in places else []
    raise first_error or NotBuiltError("its forward takes no text, picture or sound")


def _try(model: torch.nn.Module, way: WayToCall) -> None:
    """Runs a step.

    Raises:
        Exception: the model's own, or that what it gave is of no use.
    """
    mine = copy.deepcopy(model)
    torch.manual_seed(_SEED)
    loss = loss_of(mine, way.draw(torch.Generator().manual_seed(0)))
    if not bool(loss.isfinite()):
        raise NotBuiltError(f"its loss is {float(loss.detach())}")
    loss.backward()
    gradients = [p.grad for p in mine.parameters() if p.grad is not None]
    if not any(bool(one.any()) for one in gradients):
        raise NotBuiltError("its gradients are all zero")
    if not all(bool(one.isfinite().all()) for one in gradients):
        raise NotBuiltError("a gradient is not finite")


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    yield from (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))
