# SPDX-License-Identifier: Apache-2.0
"""What a finalizer does when an interrupt has ended `__init__` before its first line."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import megatron.offload

PACKAGE = Path(megatron.offload.__file__).parent


def finalized() -> list[str]:
    """The classes of the package that have a finalizer, as `module:name`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("megatron.offload", *path.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in ast.iter_child_nodes(node) if hasattr(one, "name")]
            if isinstance(node, ast.ClassDef) and "__del__" in names:
                found.append(f"{module}:{node.name}")
    return found


def test_the_package_has_finalizers() -> None:
    assert "megatron.offload.tiers.tier:Block" in finalized()


@pytest.mark.parametrize("name", finalized())
def test_an_interrupt_before_init_leaves_nothing_to_finalize(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, cls = name.partition(":")
    made = getattr(importlib.import_module(module), cls)
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    unborn = made.__new__(made)
    del unborn
    assert not raised, raised[0]
