# SPDX-License-Identifier: Apache-2.0
"""Whether a model's layers may run again in backward: `why_not_recomputed`.

Flags that name layers to recompute are refused where they may not; a plan leaves recomputation out.
"""

from __future__ import annotations

from typing import Any


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
