# SPDX-License-Identifier: Apache-2.0
"""`compiled`: makes machine code of a function when it is first called, and keeps it on disk.

`in_both` is for what Python calls too.

The simulation runs thousands of times in a solve, and a step has thousands of events. The first
call after an installation takes some ten seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core.caching import FunctionCache
from numba.extending import register_jitable

from megatron.offload.activations.transfer import pace

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


# Files whose constants or functions are part of others' machine code.
_PARTS = ("jit", "arrays", "rows", "launched", "instructions", "transfers", "other_stages", "step")


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    digest.update(Path(str(pace.__file__)).read_bytes())
    for name in _PARTS:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


_SOURCES = _digest_of_sources()


class _Cache(FunctionCache):
    """Machine code holds what it calls and the constants it uses, also those of other files."""

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(signature, codegen), _SOURCES)


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function that sees only arrays, rows, numbers and named tuples of them."""
    made = numba.njit(error_model="numpy")(function)
    # Without a directory that can be written, every process compiles for itself.
    with contextlib.suppress(RuntimeError):
        made._cache = _Cache(function)
    return made


def in_both(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function that compiled ones call with a row, and Python with a dataclass."""
    made: Callable[Arguments, Result] = register_jitable(function)
    return made
