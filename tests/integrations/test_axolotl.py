# SPDX-License-Identifier: Apache-2.0
"""Axolotl's plugin interface, as far as the plugin uses it; Axolotl itself is not run."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

NAME = "megatron.offload.integration.huggingface.axolotl"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported where Axolotl's base class is a class without anything in it."""
    if importlib.util.find_spec("axolotl") is None:
        base = types.ModuleType("axolotl.integrations.base")
        base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
        for name in ("axolotl", "axolotl.integrations"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return importlib.import_module(NAME)


def test_the_trainer_gets_a_callback_with_the_settings_of_the_config(
    plugin: Any, tmp_path: Path
) -> None:
    made = plugin.OffloadPlugin()
    module, _, name = made.get_input_args().rpartition(".")
    config = getattr(importlib.import_module(module), name)(
        activation_offload_directory=str(tmp_path),
        activation_offload_settings={"min_bytes": "64KiB"},
    )
    (callback,) = made.add_callbacks_post_trainer(config.model_dump(), trainer=None)
    assert callback._directory == (tmp_path,) and callback._settings == {"min_bytes": "64KiB"}


def test_a_config_that_says_nothing_goes_to_host_memory(plugin: Any) -> None:
    (callback,) = plugin.OffloadPlugin().add_callbacks_post_trainer({}, trainer=None)
    assert callback._directory is None and callback._settings == {}
