# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: it is built without a warning, and links hold there too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_site.hooks import OTHERS, with_links_of_the_site

import megatron.offload

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("on_site", "written", "there"),
    [
        ("index.md", "[a](docs/install.md#x)", "[a](install.md#x)"),
        ("index.md", "![a](docs/results/rok-150MBps.png)", "![a](results/rok-150MBps.png)"),
        ("index.md", "[a](docs/results/README.md)", "[a](results/README.md)"),
        ("install.md", "[first](../README.md#use)", "[first](index.md#use)"),
        ("results/rok.md", "[a](../planner.md) [b](rok.md)", "[a](../planner.md) [b](rok.md)"),
        ("examples/README.md", "[a](../docs/install.md)", "[a](../install.md)"),
        ("gpu.md", "[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        # No pages: their paths.
        ("index.md", "see [LICENSE](LICENSE).", "see `LICENSE`."),
        ("a.md", "[`train.py`](../examples/rl/remax.py)", "`train.py` (`examples/rl/remax.py`)"),
        # No links.
        ("index.md", "```text\n[a](docs/install.md)\n```", "```text\n[a](docs/install.md)\n```"),
    ],
)  # fmt: skip
def test_links_as_github_reads_them_become_those_of_the_site(
    on_site: str, written: str, there: str
) -> None:
    assert with_links_of_the_site(written, on_site) == there


def test_pages_outside_of_docs_are_there() -> None:
    assert all((ROOT / path).is_file() for path in OTHERS)


def test_every_page_is_in_the_sites_navigation() -> None:
    """Also where the site cannot be built: mkdocs would only say so in a log."""
    _, _, navigation = (ROOT / "tools/docs_site/mkdocs.yml").read_text().partition("\nnav:\n")
    named = set(re.findall(r"[\w/.-]+\.md\b", navigation))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - named == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(module, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    config = ROOT / "tools/docs_site/mkdocs.yml"
    command = ["build", "--strict", "--config-file", str(config), "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there_and_the_first_is_the_readme(site: Path) -> None:
    for page in (ROOT / "docs").glob("**/*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        folder = name.parent if name.name == "README" else name
        assert (site / folder / "index.html").is_file(), page
    first = (site / "index.html").read_text()
    assert 'href="integrations/"' in first and 'src="results/gpu/speed-and-memory.png"' in first
    assert not re.search(r'href="[^":]*\.(md|py|sh)["#]', first)


@pytest.mark.slow
def test_the_api_page_has_the_signature_and_the_docstring_of_every_public_name(site: Path) -> None:
    page = (site / "api/index.html").read_text()
    missing = [
        name for name in megatron.offload.__all__ if f'id="megatron.offload.{name}"' not in page
    ]
    assert not missing
    text = re.sub(r"<[^>]+>", "", page)
    assert "Moves what a model saves for backward to SSDs or host memory while it trains." in text
    assert "metrics_file" in text and "inside_graphs" in text
