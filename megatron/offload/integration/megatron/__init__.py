# SPDX-License-Identifier: Apache-2.0
"""Offload of activations and model states in Megatron: flags, hooks, and the CPU runtime.

Its names are imported when they are first asked for. A patched megatron-core (`patches/`) imports
`decorators` from here while it is itself imported: that must stay cheap, and never lead back to it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.offload.integration.megatron import arguments, cpu_runtime
    from megatron.offload.integration.megatron.connect import MegatronOffload, check, install
    from megatron.offload.integration.megatron.model_states import (
        ModelStates,
        check_model_states,
        offload_model_states,
    )

__all__ = [
    "MegatronOffload",
    "ModelStates",
    "arguments",
    "check",
    "check_model_states",
    "cpu_runtime",
    "install",
    "offload_model_states",
]
_OF_STATES = ("ModelStates", "check_model_states", "offload_model_states")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("arguments", "cpu_runtime"):
        return importlib.import_module(f"{__name__}.{name}")
    module = "model_states" if name in _OF_STATES else "connect"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
