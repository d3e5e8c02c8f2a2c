# SPDX-License-Identifier: Apache-2.0
"""What a layer-major step keeps in memory between two units."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import boundary


@pytest.mark.parametrize("mode", ["off", "ssd"])
def test_hidden_states_and_gradients_of_one_boundary_wait(mode: str, tmp_path: Path) -> None:
    """One of each micro-batch, however many units there are; with what the next unit has begun."""
    shape, num_batches = (2, 16, 32), 4
    one = 4 * 2 * 16 * 32
    found = boundary.measure(tmp_path, mode, "keep", 4, 4, shape, num_batches).waiting
    assert num_batches * one <= found.hidden_bytes <= (num_batches + 1) * one
    assert num_batches * one <= found.gradient_bytes <= (num_batches + 1) * one


def test_the_table_has_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--units",
        "2",
        "--layers",
        "2",
        "--micro-batches",
        "2",
        "--steps",
        "1",
        "--shape",
        "1",
        "8",
        "16",
    ]
    assert boundary.main([*sizes, "--directory", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.endswith("identical") for line in lines[1:])
