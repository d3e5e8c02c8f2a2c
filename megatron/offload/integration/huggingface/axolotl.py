# SPDX-License-Identifier: Apache-2.0
"""Axolotl's plugin interface: `OffloadPlugin` adds the callback to the trainer that it builds.

Axolotl imports it, by the name in a config's `plugins:`; nothing else does.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from megatron.offload.integration.huggingface.callback import OffloadCallback


class OffloadArgs(BaseModel):
    """What the plugin reads of a config.

    Attributes:
        activation_offload_directory: on an SSD; none: host memory.
        activation_offload_settings: of `offload_activations`, by name.
    """

    activation_offload_directory: str | list[str] | None = None
    activation_offload_settings: dict[str, Any] | None = None


class OffloadPlugin(BasePlugin):
    """Moves what the model saves for backward to SSDs or host memory."""

    def get_input_args(self) -> str:
        """Says where the names are that a config may have."""
        return f"{__name__}.{OffloadArgs.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[OffloadCallback]:
        """Gives the callback that offloads while the trainer trains."""
        settings = cfg.get("activation_offload_settings") or {}
        return [OffloadCallback(cfg.get("activation_offload_directory"), **settings)]
