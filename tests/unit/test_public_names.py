# SPDX-License-Identifier: Apache-2.0
"""The package's names where a trainer's library is not installed: the rest works, and what is
missing is named with what to install.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron.offload

ROOT = Path(__file__).resolve().parents[2]


def run_without(library: str, *lines: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own that cannot import a library."""
    script = "\n".join(["import sys", f"sys.modules[{library!r}] = None", *lines])
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


@pytest.mark.slow
def test_a_star_import_needs_no_transformers() -> None:
    result = run_without(
        "transformers",
        "from megatron.offload import *",
        "assert callable(offload_activations) and issubclass(ConfigurationError, Exception)",
        "assert 'OffloadCallback' not in globals()",
        "import megatron.offload",
        "assert set(megatron.offload.__all__) <= set(globals())",
    )
    assert result.returncode == 0, result.stderr


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
    result = run_without(library, line)
    assert result.returncode == 1
    said = result.stderr.strip().splitlines()[-1]
    assert said.startswith(f"ModuleNotFoundError: OffloadCallback is for {library}, which is not")
    assert f"; pip install {library}, or import" in said


def test_what_a_library_itself_misses_is_not_called_missing() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    result = run_without(
        "transformers.trainer_callback", "from megatron.offload import OffloadCallback"
    )
    assert result.returncode == 1 and "pip install" not in result.stderr
