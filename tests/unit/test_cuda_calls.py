# SPDX-License-Identifier: Apache-2.0
"""Only CUDA's platform names `torch.cuda`: all else in the package asks the device layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import megatron.offload

PACKAGE = Path(str(megatron.offload.__file__)).parent
DEVICE_LAYER = {"device/cuda.py"}


def calls_of_cuda(source: str) -> Iterator[int]:
    """Lines that reach for `torch.cuda`, by any way of naming it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_cuda = node.attr == "cuda" and ast.unparse(node.value) == "torch"
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            is_cuda = _is_inside(node.module or "") or (node.module == "torch" and "cuda" in names)
        elif isinstance(node, ast.Import):
            is_cuda = any(_is_inside(alias.name) for alias in node.names)
        else:
            continue
        if is_cuda:
            yield node.lineno


def _is_inside(module: str) -> bool:
    return module == "torch.cuda" or module.startswith("torch.cuda.")


def test_every_way_of_naming_it_is_found() -> None:
    source = """
import torch.cuda
import torch.cuda.nvtx as nvtx
from torch import cuda
from torch.cuda import Stream
def f(event: torch.cuda.Event): pass
x = torch.cuda
"torch.cuda"; torch.version.cuda; tensor.cuda()
"""
    assert sorted(calls_of_cuda(source)) == [2, 3, 4, 5, 6, 7]


def test_only_the_device_layer_calls_cuda() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := list(calls_of_cuda(path.read_text())))
    }
    assert found.keys() == DEVICE_LAYER, found
