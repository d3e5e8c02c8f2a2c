# SPDX-License-Identifier: Apache-2.0
"""A function of somebody else's code that we wrap where it stands: `Seam`.

`training_script.py` lists the ones it needs. A seam is checked by name and by its parameters before
it is touched. What does not fit is refused, never guessed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.offload.errors import ConfigurationError


@dataclass(frozen=True)
class Seam:
    """One function, looked up by name in its module whenever it is called.

    Attributes:
        module: import path of the module whose attribute is replaced.
        name: the function.
        parameters: the parameters that we rely on; it may have more.
    """

    module: str
    name: str
    parameters: tuple[str, ...]

    def find(self) -> Callable[..., Any]:
        """The function as it is.

        Raises:
            ConfigurationError: it is not there, or lacks a parameter.
        """
        function = getattr(importlib.import_module(self.module), self.name, None)
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
        """Puts a function in its place; the result puts the original back."""
        module, original = importlib.import_module(self.module), self.find()
        setattr(module, self.name, replacement)
        return lambda: setattr(module, self.name, original)


_ADVICE = "this Megatron-LM is not known to work: use a release that README.md names"
