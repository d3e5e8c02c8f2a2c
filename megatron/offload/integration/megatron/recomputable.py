# SPDX-License-Identifier: Apache-2.0
"""Whether a model's layers may run again in backward: `why_not_recomputed`, `check_recomputation`.

Where they may not, flags that name layers to recompute are refused, and a plan recomputes none.
Megatron's own recomputation of whole layers stays as it is, only the inputs that it keeps move.
"""

from __future__ import annotations

from typing import Any

from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError


def why_not_recomputed(settings: Any) -> str:
    """Why layers with these settings (a `TransformerConfig`) cannot be recomputed; empty: they can.

    A clause that goes on from "cannot recompute".
    """
    if getattr(settings, "moe_enable_routing_replay", False):
        return (
            "layers whose routing is replayed, which counts their passes "
            "(moe_enable_routing_replay)"
        )
    for name in ("fp8", "fp4"):
        if getattr(settings, name, None):
            return f"layers that compute in {name}, whose scales would be updated twice"
    return ""


def recomputes_fully(settings: Any) -> bool:
    """Whether Megatron itself recomputes whole layers of a model (its `TransformerConfig`)."""
    return getattr(settings, "recompute_granularity", None) == "full"


def check_recomputation(config: OffloadConfig, settings: Any) -> None:
    """Raises ConfigurationError for recomputation that cannot work, or that two flags decide.

    Args:
        config: what the flags ask for.
        settings: the model's `TransformerConfig`.
    """
    why_not = why_not_recomputed(settings)
    if config.recompute_layers is not None and why_not:
        raise ConfigurationError(
            f"--activation-recompute-layers cannot recompute {why_not}; drop one of the two"
        )
    if not recomputes_fully(settings):
        config.check_recompute_input(
            "name them, give --recompute-granularity full, or leave it out"
        )
        return
    for flag, is_given in (
        ("--activation-offload auto", config.plans),
        ("--activation-recompute-layers", config.recompute_layers is not None),
    ):
        if is_given:
            raise ConfigurationError(
                f"{flag} decides which layers are recomputed, and so does --recompute-granularity "
                "full; drop one of the two"
            )
    if config.recompute_input == "keep" and getattr(settings, "recompute_method", "") == "uniform":
        raise ConfigurationError(
            "--activation-recompute-input keep with --recompute-granularity full leaves no "
            "activations to offload; drop one of the two"
        )
