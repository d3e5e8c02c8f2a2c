# SPDX-License-Identifier: Apache-2.0
"""Activation offload in Megatron: flags, hooks, and the CPU runtime.

Its names are imported when they are first asked for. A patched megatron-core (`patches/`) imports
`calls` from here while it is itself imported: that must stay cheap, and never lead back to it.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.offload.integration.megatron import arguments, cpu_runtime
    from megatron.offload.integration.megatron.install import MegatronOffload, check, install

__all__ = ["MegatronOffload", "arguments", "check", "cpu_runtime", "install"]


class _Package(types.ModuleType):
    """`install` is a file here and a function in it; the package's `install` is the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a file sets the attribute of that name, whoever imports it.
        if name == "install" and isinstance(value, types.ModuleType):
            value = value.install
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("arguments", "cpu_runtime"):
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.install"), name)


def __dir__() -> list[str]:
    return __all__
