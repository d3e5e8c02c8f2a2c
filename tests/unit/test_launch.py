# SPDX-License-Identifier: Apache-2.0
"""The launcher: help, refusals with a sentence and exit code 2, an end that closes offload."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.offload import launch
from megatron.offload.integration.megatron import cpu_runtime, cpu_training_script
from tests.support.megatron_lm import FakeMegatronLm


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launch changes in its process, put back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(launch, "_EXIT_DELAY_S", 0.0)
    logger = logging.getLogger("megatron.offload")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def megatron_lm(monkeypatch: pytest.MonkeyPatch) -> FakeMegatronLm:
    """One that the launcher finds, as on a machine with CUDA."""
    fake = FakeMegatronLm()
    fake.put(monkeypatch)
    monkeypatch.setattr(cpu_training_script, "activate", lambda: False)
    return fake


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the launcher asked for at the end."""
    calls: list[str] = []

    class Script(launch.TrainingScript):
        def summary(self) -> str:
            calls.append("summary")
            return "what was offloaded"

        def close(self) -> None:
            calls.append("close")
            super().close()

    monkeypatch.setattr(launch, "TrainingScript", Script)
    return calls


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def sentence(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        launch.main(argv)
    assert left.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    return line.removeprefix("megatron.offload.launch: error: ")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        launch.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for word in ("torchrun --nproc-per-node", "srun", "doctor", "--activation-offload-dir DIR"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100


def test_without_a_script_the_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        launch.main([])
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "usage: python -m megatron.offload.launch SCRIPT" in captured.err


def test_a_path_that_is_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence(capsys, "/no/such/pretrain_gpt.py").startswith("/no/such/pretrain_gpt.py is")


def test_only_rank_0_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        launch.main(["/no/such/pretrain_gpt.py"])
    assert left.value.code == 2
    assert capsys.readouterr().err == ""


def test_a_script_without_megatron_lm_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_training_script, "activate", lambda: False)
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    script = write(tmp_path / "train.py", "raise SystemError\n")
    assert sentence(capsys, script).startswith("there is no megatron.training beside ")


def test_a_package_that_megatron_lm_lacks_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def activate() -> bool:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(cpu_training_script, "activate", activate)
    script = write(tmp_path / "train.py", "raise SystemError\n")
    assert "No module named 'triton'; install what it needs" in sentence(capsys, script)


def test_a_seam_that_is_missing_is_refused_before_the_script_runs(
    capsys: pytest.CaptureFixture[str], megatron_lm: FakeMegatronLm, tmp_path: Path
) -> None:
    del megatron_lm.training.train_step
    script = write(tmp_path / "train.py", "raise SystemError\n")
    assert sentence(capsys, script).startswith(
        "megatron.training.training has no function train_step; "
    )


def test_the_script_runs_as_main_with_its_flags_and_its_directory(
    capsys: pytest.CaptureFixture[str],
    megatron_lm: FakeMegatronLm,
    ended: list[str],
    tmp_path: Path,
) -> None:
    write(tmp_path / "beside.py", "VALUE = 5\n")
    script = write(
        tmp_path / "train.py",
        "import sys\nfrom beside import VALUE\nprint(__name__, sys.argv[1:], VALUE)\n",
    )
    launch.main([script, "--lr", "1"])
    out = capsys.readouterr().out
    assert out == "__main__ ['--lr', '1'] 5\nwhat was offloaded\n"
    assert ended == ["summary", "close"]


@pytest.mark.parametrize(
    ("ending", "error", "calls"),
    [
        ("raise RuntimeError('x')", RuntimeError, ["close"]),
        ("raise KeyboardInterrupt", KeyboardInterrupt, ["close"]),
        ("import sys; sys.exit(3)", SystemExit, ["close"]),
        ("import sys; sys.exit(0)", SystemExit, ["summary", "close"]),
    ],
    ids=["exception", "interrupt", "exit 3", "exit 0"],
)
def test_however_the_script_ends_offload_is_closed(
    megatron_lm: FakeMegatronLm,
    ended: list[str],
    tmp_path: Path,
    ending: str,
    error: type[BaseException],
    calls: list[str],
) -> None:
    script = write(tmp_path / "train.py", f"{ending}\n")
    with pytest.raises(error):
        launch.main([script])
    assert ended == calls


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("pass", None),
        ("import sys; sys.exit(0)", SystemExit),
        (
            "from megatron.offload import ConfigurationError; raise ConfigurationError('x')",
            SystemExit,
        ),
    ],
    ids=["end", "exit 0", "refusal"],
)
def test_on_a_cpu_no_process_group_is_left_to_the_interpreters_end(
    monkeypatch: pytest.MonkeyPatch,
    megatron_lm: FakeMegatronLm,
    tmp_path: Path,
    ending: str,
    error: type[BaseException] | None,
) -> None:
    monkeypatch.setattr(cpu_runtime, "is_active", lambda: True)
    script = write(
        tmp_path / "train.py",
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        f"{ending}\n",
    )
    with pytest.raises(error) if error else contextlib.nullcontext():
        launch.main([script])
    assert not torch.distributed.is_initialized()
