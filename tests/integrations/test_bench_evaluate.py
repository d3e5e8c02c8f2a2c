# SPDX-License-Identifier: Apache-2.0
"""The bench of evaluation unit by unit, and ReMax, in small."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import evaluate

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_compute_thread")


def test_the_table_has_a_line_for_each_way(tmp_path: Path) -> None:
    found = evaluate.evaluate_part(
        tmp_path, layers=3, hidden=64, tokens=8, batches=4, rate=1e12, rounds=1
    )
    assert found["identical"]
    assert 0 < found["evaluate_bytes_ratio"] <= evaluate.MOST_BYTES
    assert found["peak_parameter_units"] <= evaluate.MOST_UNITS
    assert found["ways"]["loop"]["read_bytes"] >= 3 * found["ways"]["evaluate"]["read_bytes"]
    lines = evaluate.table(found).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(evaluate.WAYS)
    kept, lean = (
        found["ways"][f"evaluate{kind}"]["peak_tensor_bytes"]
        - found["ways"][f"loop{kind}"]["peak_tensor_bytes"]
        for kind in ("", ", no cache")
    )
    # Three batches wait beside the one that runs; losses are 4 bytes each.
    assert 0 < lean <= found["boundary_bytes"] + 16
    assert lean < kept <= found["boundary_bytes"] + found["key_value_bytes"] + 16


@pytest.mark.parametrize("has_value_model", [False, True])
def test_remax_has_the_same_bits_without_offload(
    has_value_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples/rl"), *sys.path])
    import remax

    def trained(mode: str) -> dict[str, Any]:
        args = remax.make_parser().parse_args([])
        sizes = {"seed": 3, "steps": 2, "layers": 2, "hidden": 64, "batch": 4, "tokens": 4}
        changes = {"directory": tmp_path, "offload": mode, "value_model": has_value_model, **sizes}
        found: dict[str, Any] = remax.train(argparse.Namespace(**{**vars(args), **changes}))
        return found

    ssd, off = trained("ssd"), trained("off")
    assert ssd["rewards"] == off["rewards"] and ssd["weights"] == off["weights"]
