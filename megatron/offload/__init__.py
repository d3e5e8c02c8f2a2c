# SPDX-License-Identifier: Apache-2.0
"""Activation placement for transformer training: device memory, recomputation, host DRAM or SSD.

Start reading at `activations/engine.py`, which wires everything; `docs/architecture.md` shows the
way of one activation and which file to open for what. The names below are imported when they are
first asked for: a patched megatron-core imports a small part of this package, not torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.offload.activations.engine import OffloadEngine
    from megatron.offload.activations.placement.policy import Placement, Policy
    from megatron.offload.activations.saved.scope import Scope
    from megatron.offload.config import OffloadConfig
    from megatron.offload.errors import (
        ChangedInPlaceError,
        ConfigurationError,
        InterruptedStepError,
        LostStateError,
        OffloadError,
        StorageError,
    )
    from megatron.offload.integration.huggingface.callback import OffloadCallback
    from megatron.offload.integration.settings_file import read_settings
    from megatron.offload.integration.torch.door import offload_activations
    from megatron.offload.integration.torch.frozen_features import cache_frozen
    from megatron.offload.integration.torch.layer_major import LayerMajor
    from megatron.offload.integration.torch.offload_model import offload
    from megatron.offload.integration.torch.optimizer import offload_optimizer
    from megatron.offload.integration.torch.parameter_offload import offload_parameters
    from megatron.offload.version import __version__ as __version__

__all__ = [
    "ChangedInPlaceError",
    "ConfigurationError",
    "InterruptedStepError",
    "LayerMajor",
    "LostStateError",
    "OffloadCallback",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "Placement",
    "Policy",
    "Scope",
    "StorageError",
    "cache_frozen",
    "offload",
    "offload_activations",
    "offload_optimizer",
    "offload_parameters",
    "read_settings",
]
# Type checkers read every change of `__all__`, whatever it depends on.
if not TYPE_CHECKING and importlib.util.find_spec("transformers") is None:
    __all__.remove("OffloadCallback")  # `import *` would ask for it; alone it names what is missing

_FILES = {
    "ChangedInPlaceError": "errors",
    "ConfigurationError": "errors",
    "InterruptedStepError": "errors",
    "LayerMajor": "integration.torch.layer_major",
    "LostStateError": "errors",
    "OffloadCallback": "integration.huggingface.callback",
    "OffloadConfig": "config",
    "OffloadEngine": "activations.engine",
    "OffloadError": "errors",
    "Placement": "activations.placement.policy",
    "Policy": "activations.placement.policy",
    "Scope": "activations.saved.scope",
    "StorageError": "errors",
    "__version__": "version",
    "cache_frozen": "integration.torch.frozen_features",
    "offload": "integration.torch.offload_model",
    "offload_activations": "integration.torch.door",
    "offload_optimizer": "integration.torch.optimizer",
    "offload_parameters": "integration.torch.parameter_offload",
    "read_settings": "integration.settings_file",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
