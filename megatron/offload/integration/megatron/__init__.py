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
    from megatron.offload.integration.megatron.parameters import (
        ModelParameters,
        check_model_parameters,
        offload_model_parameters,
    )

__all__ = [
    "MegatronOffload",
    "ModelParameters",
    "ModelStates",
    "arguments",
    "check",
    "check_model_parameters",
    "check_model_states",
    "cpu_runtime",
    "install",
    "offload_model_parameters",
    "offload_model_states",
]
_FILES = {
    "ModelParameters": "parameters",
    "ModelStates": "model_states",
    "check_model_parameters": "parameters",
    "check_model_states": "model_states",
    "offload_model_parameters": "parameters",
    "offload_model_states": "model_states",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("arguments", "cpu_runtime"):
        return importlib.import_module(f"{__name__}.{name}")
    module = _FILES.get(name, "connect")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
