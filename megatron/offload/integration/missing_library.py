# SPDX-License-Identifier: Apache-2.0
"""The error that a user gets where an integration's library is not installed: `named`.

The packages of `huggingface/` and `lightning/` import their callbacks within it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator


@contextlib.contextmanager
def named(library: str) -> Iterator[None]:
    """Says what to install where a library is missing.

    Raises:
        ModuleNotFoundError: it is not installed; of other modules, as it comes.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if importlib.util.find_spec(library) is not None:
            raise
        raise ModuleNotFoundError(
            f"OffloadCallback is for {library}, which is not installed; pip install {library}, or "
            "import offload_activations, which needs nothing but torch",
            name=library,
        ) from error
