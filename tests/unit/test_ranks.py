# SPDX-License-Identifier: Apache-2.0
"""What a test of several ranks says when they do not end well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import os, signal, time\nrank = int(os.environ['RANK'])\n{text}\n")
    return path


@pytest.mark.slow
def test_ranks_that_do_not_end_are_named_with_what_the_first_has_said(tmp_path: Path) -> None:
    waits = script(tmp_path, "print('rank', rank, 'waits', flush=True)\ntime.sleep(600)")
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] had not ended after 3 s") as error:
        run_ranks(waits, tmp_path, patience_s=3, fresh=True)
    assert "the end of rank 0" in str(error.value)


@pytest.mark.slow
def test_a_rank_that_has_failed_is_shown_and_not_those_that_waited_for_it(tmp_path: Path) -> None:
    text = "time.sleep(600) if rank == 0 else exit('rank 1 has no corpus')"
    with pytest.raises(AssertionError, match=": rank 1 has no corpus; the end of rank 1:\n"):
        run_ranks(script(tmp_path, text), tmp_path, fresh=True)


@pytest.mark.slow
def test_a_rank_that_the_system_has_killed_is_one_that_has_failed(tmp_path: Path) -> None:
    text = "time.sleep(600) if rank == 0 else os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(AssertionError, match=r"ranks ended with \[-9, -9\]: ; the end of rank 1"):
        run_ranks(script(tmp_path, text), tmp_path, fresh=True)
