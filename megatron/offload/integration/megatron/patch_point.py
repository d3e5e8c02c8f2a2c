# SPDX-License-Identifier: Apache-2.0
"""A function of megatron-core or Megatron-LM that we replace with a wrapper: `PatchPoint`.

`patch_points.py` lists those of megatron-core, `training_script.py` those of Megatron-LM. A patch
point is checked by name and parameters before it is touched. What does
not fit is refused, not guessed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.offload.errors import ConfigurationError


@dataclass(frozen=True)
class PatchPoint:
    """A function of another package that can be replaced, by the module and name it is called by.

    Attributes:
        module: import path of the module whose attribute is replaced.
        name: the function, or `Class.method`.
        parameters: the parameters that we rely on; it may have more.
    """

    module: str
    name: str
    parameters: tuple[str, ...]

    def find(self) -> Callable[..., Any]:
        """The function that stands there now.

        Raises:
            ConfigurationError: it is not there, or lacks a parameter.
        """
        owner, name = self._place()
        function = getattr(owner, name, None)
        if not callable(function):
            raise ConfigurationError(f"{self.module} has no function {self.name}; {_ADVICE}")
        found = inspect.signature(function).parameters
        missing = [name for name in self.parameters if name not in found]
        if missing:
            raise ConfigurationError(
                f"{self.module}.{self.name} has no parameter {' and no '.join(missing)}, only "
                f"({', '.join(found)}); {_ADVICE}"
            )
        return function

    def replace(self, replacement: Callable[..., Any]) -> Callable[[], None]:
        """Puts another function there; returns a function that puts the original back."""
        original = self.find()
        owner, name = self._place()
        setattr(owner, name, replacement)
        return lambda: setattr(owner, name, original)

    def _place(self) -> tuple[Any, str]:
        """The module or class, and the attribute's name in it."""
        *classes, name = self.name.split(".")
        owner: Any = importlib.import_module(self.module)
        for part in classes:
            owner = getattr(owner, part, None)
        return owner, name


_ADVICE = "this Megatron is not known to work: use a release that README.md names"
