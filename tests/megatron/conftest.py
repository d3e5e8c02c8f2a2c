# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the trainer's tests: the trainer package, and a run that several compare with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The trainer is a directory of scripts, not an installed package; the launcher lies beside this.
for directory in (ROOT / "examples", Path(__file__).parent):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))

from launch import Outcome, train  # noqa: E402


@pytest.fixture(scope="session")
def one_process() -> Outcome:
    """Four uninterrupted steps of the tiny model on one rank, dropout on.

    In a new interpreter: what the script prints while it imports is in the output.
    """
    return train("--train-iters 4", fresh=True)
