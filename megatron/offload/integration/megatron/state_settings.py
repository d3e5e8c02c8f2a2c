# SPDX-License-Identifier: Apache-2.0
"""Which optimizers of Megatron can have their states offloaded: `check_state_settings`.

An optimizer that is not known to give the same results is refused, by its settings before anything
is built, and by its class after that. Both need nothing of Megatron but attributes.
"""

from __future__ import annotations

from typing import Any

from megatron.offload.integration.megatron import refused
from megatron.offload.tiers.purpose import STATES

_FLOATS = ("float32", "bfloat16")

# The optimizers that update each parameter by its gradient and state alone.
_KNOWN_NAMES = ("adam", "sgd")
_KNOWN_KINDS = ("Adam", "AdamW", "SGD", "FusedAdam", "FusedSGD")


def check_state_settings(settings: Any) -> None:
    """Raises ConfigurationError for settings that state offload cannot join.

    Args:
        settings: Megatron's `OptimizerConfig`, or the flags that make one.
    """
    refused.STATES.check(settings)
    kind = getattr(settings, "optimizer", "adam")
    if kind not in _KNOWN_NAMES:
        raise STATES.refusal(
            f"optimizer {kind} cannot be combined with state offload: it is not known to update "
            "each parameter by its gradient and state alone; use --optimizer adam or sgd, or "
            "--optimizer-state-offload off"
        )
    if not getattr(settings, "use_precision_aware_optimizer", False):
        return
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
        dtype = str(getattr(settings, name, "float32")).removeprefix("torch.")
        dtype = {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, dtype)
        if dtype not in _FLOATS:
            raise STATES.refusal(
                f"{name} {dtype} cannot be combined with state offload: such states have scales "
                f"beside them; use fp32 or bf16 for --{name.replace('_', '-')}"
            )
    if getattr(settings, "store_param_remainders", False):
        raise STATES.refusal(
            "store_param_remainders cannot be combined with state offload: main weights are made "
            "of two halves, of which one moves; drop --use-precision-aware-optimizer or switch "
            "store_param_remainders off"
        )


def check_inner_optimizer(optimizer: Any) -> None:
    """Raises ConfigurationError for a Megatron optimizer whose inner one is not known.

    Args:
        optimizer: a `MegatronOptimizer` that has parameters.
    """
    inner = optimizer.optimizer
    kind = type(inner).__name__
    if kind not in _KNOWN_KINDS:
        raise STATES.refusal(
            f"{kind} cannot be combined with state offload: it is not known to update each "
            "parameter by its gradient and state alone; use --optimizer adam or sgd, or "
            "--optimizer-state-offload off"
        )
    if kind.startswith("Fused") and getattr(inner, "capturable", False):
        raise STATES.refusal(
            f"{kind} with capturable cannot be combined with state offload: all buckets would "
            "count the same step; build it without capturable"
        )
    ddp_config = getattr(optimizer, "ddp_config", None)
    for name in ("use_megatron_fsdp", "fp8_param_gather"):
        if getattr(ddp_config, name, False):
            raise refused.STATES.refusal(name)
