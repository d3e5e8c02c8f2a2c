# SPDX-License-Identifier: Apache-2.0
"""A dozen families of transformers with every door, as tools/check/families.py tries all of them.

Each of them has found something. Defaults are the classes' own but for sizes.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from check.families import QUICK
from check.family.catalogue import families
from check.family.cells import Cell, Left, Outcome
from check.family.columns import COLUMNS
from check.family.pool import Work, run_here

# One has no attention, the others none by torch's scaled_dot_product_attention.
IN_PLACE_OF_SDPA = {"resnet": "eager", "gemma2": "eager", "bloom": "eager"}
if version("transformers").startswith("4."):
    IN_PLACE_OF_SDPA["t5"] = "eager"
PLANNED = "llama"  # a plan takes seconds, so `auto` is tried with one
WITHOUT_AUTO = tuple(column for column in COLUMNS if column != "auto")


def cells_of(
    name: str, attention: str, columns: tuple[str, ...], directory: Path
) -> dict[str, Cell]:
    """What a family does in columns."""
    found: list[object] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of more threads may differ from run to run
    try:
        run_here(Work(families()[name], attention, columns), directory, found.append)
    finally:
        torch.set_num_threads(threads)
    assert not [one for one in found if isinstance(one, Left)], found
    return {one.column: one for one in found if isinstance(one, Cell)}


def check(cells: dict[str, Cell]) -> None:
    failed = [one for one in cells.values() if one.outcome in (Outcome.CRASH, Outcome.DIFFERENT)]
    assert not failed
    if "ssd" in cells:
        assert cells["ssd"].outcome is Outcome.IDENTICAL and cells["ssd"].moved
    refused = [one for one in cells.values() if one.outcome is Outcome.REFUSED]
    assert all("; " in one.note for one in refused), "a refusal says what to do"


@pytest.mark.slow(but="t5")
@pytest.mark.parametrize("name", QUICK)
def test_a_family_trains_the_same_or_is_refused(name: str, tmp_path: Path) -> None:
    check(cells_of(name, IN_PLACE_OF_SDPA.get(name, "sdpa"), WITHOUT_AUTO, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == PLANNED else pytest.param(name, marks=pytest.mark.rare) for name in QUICK],
)
def test_a_family_trains_the_same_with_auto(name: str, tmp_path: Path) -> None:
    check(cells_of(name, IN_PLACE_OF_SDPA.get(name, "sdpa"), ("auto",), tmp_path))


@pytest.mark.rare
@pytest.mark.parametrize("name", sorted(set(QUICK) - IN_PLACE_OF_SDPA.keys()))
def test_a_family_trains_the_same_with_eager_attention(name: str, tmp_path: Path) -> None:
    check(cells_of(name, "eager", WITHOUT_AUTO, tmp_path))
