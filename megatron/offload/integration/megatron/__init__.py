# SPDX-License-Identifier: Apache-2.0
"""Activation offload in Megatron: flags, hooks, and the CPU runtime.

Its names are imported when they are first asked for. A patched megatron-core (`patches/`) imports
`decorators` from here while it is itself imported: that must stay cheap, and never lead back to it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.offload.integration.megatron import arguments, cpu_runtime
    from megatron.offload.integration.megatron.connect import MegatronOffload, check, install

__all__ = ["MegatronOffload", "arguments", "check", "cpu_runtime", "install"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("arguments", "cpu_runtime"):
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.connect"), name)


def __dir__() -> list[str]:
    return __all__
