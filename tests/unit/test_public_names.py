# SPDX-License-Identifier: Apache-2.0
"""The package's names where a trainer's library is not installed: the rest works, and what is
missing is named with what to install.
"""

from __future__ import annotations

import re

import pytest

import megatron.offload
from tests.support.processes import ROOT, finish, start_python


def run_without(library: str, *lines: str) -> tuple[int, str]:
    """Exit code and errors of a script in a process of its own that cannot import a library."""
    script = "\n".join(["import sys", f"sys.modules[{library!r}] = None", *lines])
    code, _, errors = finish(start_python(script))
    return code, errors


@pytest.mark.slow
def test_a_star_import_needs_no_transformers() -> None:
    code, errors = run_without(
        "transformers",
        "from megatron.offload import *",
        "assert callable(offload_activations) and issubclass(ConfigurationError, Exception)",
        "assert 'OffloadCallback' not in globals()",
        "import megatron.offload",
        "assert set(megatron.offload.__all__) <= set(globals())",
    )
    assert code == 0, errors


def test_a_star_import_has_every_name_where_transformers_is_there() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert all(hasattr(megatron.offload, name) for name in megatron.offload.__all__)
    assert "OffloadCallback" in megatron.offload.__all__


def test_the_api_page_has_every_name() -> None:
    page = (ROOT / "docs/api.md").read_text()
    named = re.findall(r"^::: megatron\.offload\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted({*megatron.offload.__all__, "OffloadCallback"})


@pytest.mark.parametrize(
    ("library", "line"),
    [
        # README's first import
        (
            "transformers",
            "from megatron.offload import OffloadCallback, offload_activations",
        ),
        (
            "transformers",
            "from megatron.offload.integration.huggingface import OffloadCallback",
        ),
        (
            "lightning",
            "from megatron.offload.integration.lightning import OffloadCallback",
        ),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_to_do(library: str, line: str) -> None:
    code, errors = run_without(library, line)
    assert code == 1
    said = errors.strip().splitlines()[-1]
    assert said.startswith(f"ModuleNotFoundError: OffloadCallback is for {library}, which is not")
    assert f"; pip install {library}, or import" in said


def test_what_a_library_itself_misses_is_not_called_missing() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    code, errors = run_without(
        "transformers.trainer_callback", "from megatron.offload import OffloadCallback"
    )
    assert code == 1 and "pip install" not in errors
