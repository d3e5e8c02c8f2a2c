# SPDX-License-Identifier: Apache-2.0
"""torchrun's report, the last that a user sees, shows the sentence of a process that failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.offload.integration.torchrun_report import record_sentence, recorded_errors
from tests.support.launch import SCRIPTS, rank_environment


def root_cause(num_ranks: int, *words: str) -> str:
    """What the report of a real torchrun says of the process that failed first."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={num_ranks}", *words],
        env=rank_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1  # torchrun's own
    report = done.stdout.rpartition("Root Cause")[2]
    assert "exitcode  : 2 " in report, done.stdout
    return report


def test_of_the_launcher_with_one_rank() -> None:
    report = root_cause(1, "-m", "megatron.offload.launch", "/no/such/pretrain_gpt.py")
    assert "megatron.offload.launch: error: /no/such/pretrain_gpt.py is not a file; give" in report
    assert "Traceback" not in report


@pytest.mark.slow
def test_of_the_launcher_with_two_ranks() -> None:
    report = root_cause(2, "-m", "megatron.offload.launch", "/no/such/pretrain_gpt.py")
    assert "megatron.offload.launch: error: /no/such/pretrain_gpt.py is not a file; give" in report


@pytest.mark.slow
def test_of_the_trainer_with_two_ranks() -> None:
    flags = ("--mock-data", "--activation-offload", "ssd")
    report = root_cause(2, str(SCRIPTS["gpt"]), *flags)
    assert "pretrain_gpt.py: error" in report and "needs a place on an SSD" in report


def test_without_torchrun_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    record_sentence("what happened")
    with pytest.raises(KeyError), recorded_errors():
        raise KeyError("x")


def test_an_exception_is_there_with_its_traceback_and_an_exit_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit), recorded_errors():
        sys.exit(1)
    assert not file.exists()
    with pytest.raises(ZeroDivisionError), recorded_errors():
        _ = 1 / 0
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ZeroDivisionError: division by zero"
    assert "test_torchrun_report.py" in message["extraInfo"]["py_callstack"]
    record_sentence("what happened")  # what the launcher makes of it comes last
    assert json.loads(file.read_text())["message"]["message"] == "what happened"


def test_a_file_that_cannot_be_written_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    record_sentence("what happened")
    with pytest.raises(KeyError, match="x"), recorded_errors():
        raise KeyError("x")
