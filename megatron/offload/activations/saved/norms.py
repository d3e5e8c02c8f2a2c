# SPDX-License-Identifier: Apache-2.0
"""The eps of norms, which autograd's graph does not show: `Norms`.

Integrations say which models train; the finder of recipes asks by the weight of a norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_EPS = "eps"  # in the names of attributes: eps, variance_epsilon, layer_norm_eps


class Norms:
    """What the modules of models say about their eps."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._of_weight: dict[int, tuple[weakref.ref[torch.Tensor], float]] = {}
        self._has_looked = False

    def add(self, models: Iterable[torch.nn.Module]) -> None:
        """These models train."""
        self._models.extend(weakref.ref(one) for one in models)

    def begin_step(self) -> None:
        """Modules may have new parameters."""
        self._has_looked = False

    def eps_of(self, weight: torch.Tensor) -> float | None:
        """The eps of the module that owns a weight; None: there is none, or it has several."""
        found = self._of_weight.get(id(weight))
        if (found is None or found[0]() is not weight) and not self._has_looked:
            self._look()
            found = self._of_weight.get(id(weight))
        return None if found is None or found[0]() is not weight else found[1]

    def _look(self) -> None:
        self._has_looked = True
        self._of_weight = {}
        for reference in self._models:
            model = reference()
            for module in () if model is None else model.modules():
                values = {
                    value
                    for name, value in vars(module).items()
                    if _EPS in name and type(value) is float
                }
                if len(values) != 1:
                    continue
                eps = values.pop()
                for weight in module.parameters(recurse=False):
                    self._of_weight[id(weight)] = weakref.ref(weight), eps
