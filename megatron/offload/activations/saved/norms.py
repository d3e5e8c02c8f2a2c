# SPDX-License-Identifier: Apache-2.0
"""The eps and frozen biases of norms, which autograd's graph does not show: `Norms`.

Integrations say which models train; the finder of recipes asks by the weight of a norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_TORCHS_OWN = "torch.nn.modules."  # forward passes, which use the bias that the module has
_EPS = "eps"  # in the names of attributes: eps, variance_epsilon, layer_norm_eps


class Norms:
    """What the modules of models say about their eps and their biases.

    It refers to modules, see Note [No weak references to parameters] in `weight_casts.py`.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._of_weight: dict[int, tuple[weakref.ref[torch.nn.Module], float]] = {}
        self._has_looked = False

    def add(self, models: Iterable[torch.nn.Module]) -> None:
        """These models train."""
        self._models.extend(weakref.ref(one) for one in models)

    def begin_step(self) -> None:
        """Modules may have new parameters."""
        self._has_looked = False

    def eps_of(self, weight: torch.Tensor) -> float | None:
        """The eps of the module that owns a weight; None: there is none, or it has several."""
        found = self._owner_of(weight)
        return None if found is None else found[1]

    def bias_of(self, weight: torch.Tensor) -> torch.nn.Parameter | None:
        """The bias of the norm of torch that owns a weight; None: there is none."""
        found = self._owner_of(weight)
        if found is None or not type(found[0]).forward.__module__.startswith(_TORCHS_OWN):
            return None
        return found[0]._parameters.get("bias")

    def _owner_of(self, weight: torch.Tensor) -> tuple[torch.nn.Module, float] | None:
        """The module that owns a weight, and its eps."""
        found = self._known_owner_of(weight)
        if found is None and not self._has_looked:
            self._look()
            found = self._known_owner_of(weight)
        return found

    def _known_owner_of(self, weight: torch.Tensor) -> tuple[torch.nn.Module, float] | None:
        reference, eps = self._of_weight.get(id(weight), (None, 0.0))
        module = None if reference is None else reference()
        if module is None or all(one is not weight for one in module._parameters.values()):
            return None
        return module, eps

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
                owner, eps = weakref.ref(module), values.pop()
                for weight in module.parameters(recurse=False):
                    self._of_weight[id(weight)] = owner, eps
