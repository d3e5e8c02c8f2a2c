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


def test_without_a_script_the_usage_is_short_and_the_last_line_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        launch.main([])
    assert left.value.code == 2
    captured = capsys.readouterr()
    usage, *_, last = captured.err.splitlines()
    assert usage.startswith("usage: python -m megatron.offload.launch SCRIPT")
    assert last.startswith("megatron.offload.launch: error: there is no script to run; give one")
    assert captured.out == "" and len(captured.err.splitlines()) < 5


READS_ITS_FLAGS = """
import argparse
from megatron.training import arguments
parser = arguments.add_megatron_arguments(argparse.ArgumentParser(prog="train.py"))
parser.parse_args()
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--activation-offlod ssd",
            "no flag --activation-offlod (did you mean --activation-offload?)",
        ),
        ("--micro-batch-sizes=2", "no flag --micro-batch-sizes (did you mean --micro-batch-size?)"),
        ("--nonsense", "there is no flag --nonsense; python -m"),
        (
            "--activation-offload nowhere",
            "argument --activation-offload: invalid choice: 'nowhere'",
        ),
        ("--micro-batch-size x", "argument --micro-batch-size: invalid int value: 'x'"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_a_flag_that_is_none_is_a_sentence_and_no_usage(
    capsys: pytest.CaptureFixture[str],
    megatron_lm: FakeMegatronLm,
    tmp_path: Path,
    flags: str,
    said: str,
) -> None:
    script = write(tmp_path / "train.py", READS_ITS_FLAGS)
    line = sentence(capsys, script, *flags.split())
    assert said in line
    assert line.endswith(f"; python -m megatron.offload.launch {script} --help shows all flags")


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
    ("line", "reason"),
    [
        ("assert args is not None", "assert args is not None; it says so in line 2 of "),
        (
            "assert args is not None, 'num_layers argument is None'",
            "num_layers argument is None; it",
        ),
    ],
)
def test_flags_that_megatron_lm_asserts_are_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
    megatron_lm: FakeMegatronLm,
    tmp_path: Path,
    line: str,
    reason: str,
) -> None:
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    checks = write(folder / "arguments.py", f"args = None\n{line}\n")
    script = write(tmp_path / "train.py", f"import runpy\nrunpy.run_path({checks!r})\n")
    said = sentence(capsys, script)
    assert said.startswith(f"Megatron-LM refuses the flags: {reason}") and said.endswith(checks)


def test_what_a_script_asserts_itself_is_its_own_error(
    megatron_lm: FakeMegatronLm, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="wrong data"):
        launch.main([write(tmp_path / "train.py", "assert False, 'wrong data'\n")])


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


def test_a_script_that_shows_its_flags_says_nothing_of_offload(
    megatron_lm: FakeMegatronLm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path / "train.py", "import argparse; argparse.ArgumentParser().parse_args()")
    with pytest.raises(SystemExit) as left:
        launch.main([script, "--help"])
    assert not left.value.code
    assert "activation offload" not in capsys.readouterr().out


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
