# SPDX-License-Identifier: Apache-2.0
"""Activation offload in Lightning: `OffloadCallback`."""

from __future__ import annotations

from megatron.offload.integration.missing_library import named

with named("lightning"):
    from megatron.offload.integration.lightning.callback import OffloadCallback

__all__ = ["OffloadCallback"]
