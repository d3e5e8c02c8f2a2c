# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ say is so: commands and their flags, links, names of files, the flags.

A block of commands is fenced as `bash`. Each of them is in `COMMANDS`: with the test that runs it,
or with what it needs that a test does not have. Their flags are given to their parsers here;
nothing is trained.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.run import get_args_parser
from trainer.arguments import parse_arguments
from trainer.experts import add_arguments as add_expert_arguments
from write_flags import KEYWORDS, flags_page, keywords_file
from write_flags import PAGE as FLAGS_PAGE
from write_refusals import PAGE as REFUSALS_PAGE
from write_refusals import refusals_page
from write_replay import PAGE as REPLAY_PAGE
from write_replay import replay_page

from megatron.offload import cli, read_settings
from megatron.offload.commands.rok.result import Result
from megatron.offload.commands.rok.text import measurements_table, verdict_table
from megatron.offload.config import OffloadConfig
from megatron.offload.integration.megatron.arguments import add_offload_arguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "patches/*.md")
    for path in ROOT.glob(pattern)
)
NOT_OURS = {"megatron/__init__.py", "pretrain_*.py"}  # never here; Megatron-LM's
TOP_FOLDERS = "docs|examples|megatron|patches|tests|tools"
LANGUAGES = {"bash", "text", "python", "toml"}

# For each command the first row that fits: what it looks like, and the test that runs it or what it
# needs. A test that runs the program with other sizes or flags counts; the flags are checked below.
COMMANDS: tuple[tuple[str, str], ...] = (
    (r"^pip (un)?install|^docker |^source |^git pull",
     "needs: the network, docker or a shell of your own"),
    (r"-m mkdocs build", "tests/integrations/test_docs_site.py::"
     "test_every_page_is_there_and_the_first_is_the_readme"),
    (r"-m mkdocs serve", "needs: a browser"),
    (r"^srun .*megatron-offload doctor",
     "tests/unit/test_doctor.py::test_a_directory_is_taken_for_ssd"),
    (r"^srun .*mkdir", "needs: Slurm"),
    (r"^torchrun|^srun ", "tests/megatron/test_unmodified_megatron_lm.py::"
     "test_losses_weights_and_optimizer_are_bit_identical"),
    (r"pytest tests/megatron/test_unmodified_", "needs: a Megatron-LM checkout"),
    (r"pytest tests/megatron/test_matrix\.py --full-matrix", "needs: 24 minutes"),
    (
        r"pytest tests/lag/",
        "tests/lag/test_transfers_on_an_accelerator.py"
        "::test_results_are_equal_whichever_stream_is_late",
    ),
    (r"^\./tests/run\.sh|^\.venv/bin/python tests/mutations", "needs: minutes; it runs the tests"),
    (r"^\.venv/bin/python tests/ordering\.py", "needs: 12 minutes"),
    (r"^tools/gpu_check\.py", "needs: a GPU; tests/megatron/test_gpu_check.py tries it on a CPU"),
    (r"^tools/gpu_wheels\.sh",
     "tests/integrations/test_gpu_day.py::"
     "test_wheels_are_those_of_the_pinned_versions_and_their_size_is_said"),
    (r"^python3 -m pip install .*wheels/", "needs: the wheels of the command before it"),
    (r"tools/gpu_day\.py",
     "tests/integrations/test_gpu_day.py::test_every_part_runs_on_the_cpu"),
    (r"^mutmut ", "needs: mutmut, which is installed on demand"),
    (r"^\./examples/pretrain_gpt\.sh --help", "needs: nothing; it shows what is parsed below"),
    (r"^\./examples/pretrain_gpt\.sh .*--activation-offload auto",
     "tests/megatron/test_auto.py::test_auto_changes_no_bit"),
    (r"^\./examples/pretrain_gpt\.sh .*--activation-offload-trace",
     "tests/megatron/test_trace.py::test_a_training_is_traced_and_its_results_are_the_same"),
    (r"NPROC_PER_NODE=2 \./examples/pretrain_gpt\.sh",
     "tests/megatron/test_offload_is_bit_identical.py::"
     "test_offload_changes_no_bit"),
    (r"^\./examples/pretrain_gpt\.sh",
     "tests/unit/test_docs.py::test_the_first_command_checks_its_flags_and_starts"),
    (r"^\./examples/pretrain_(bert|t5)\.sh",
     "tests/megatron/test_bert_and_t5.py::test_offload_changes_no_bit"),
    (r"examples/cluster/train\.sh",
     "tests/megatron/test_cluster_examples.py::test_flags_pass_the_trainers_checks"),
    (r"sbatch .*examples/cluster/train\.sbatch",
     "tests/megatron/test_cluster_examples.py::test_a_slurm_job_starts_each_node_with_its_number"),
    (r"examples/huggingface/train\.sh", "tests/integrations/test_examples.py::"
     "test_a_qwen_with_adapters_trains_the_same_with_transformers_trainer"),
    (r"examples/fsdp2/train\.sh",
     "tests/integrations/test_examples.py::test_two_ranks_of_fsdp2_train_the_same"),
    (r"examples/deepspeed/train\.sh", "needs: a minute, and frameworks"),
    (r"megatron-offload doctor --script",
     "tests/integrations/test_script_commands.py::test_doctor_looks_at_the_settings_in_it"),
    (r"megatron-offload (report|rok) .*-- torchrun",
     "tests/megatron/test_measured_megatron_lm.py::test_report_runs_the_launch_command_twice"),
    (r"megatron-offload tune .*-- torchrun",
     "tests/unit/test_tune.py::"
     "test_a_pipeline_is_started_by_torchrun_and_chosen_by_what_was_measured"),
    (r"megatron-offload report --memory",
     "tests/unit/test_memory_command.py::"
     "test_the_largest_peak_is_explained_from_its_largest_part_on"),
    (r"megatron-offload report --script",
     "tests/integrations/test_script_commands.py::"
     "test_report_runs_it_without_offload_and_as_it_is"),
    (r"megatron-offload rok --script",
     "tests/integrations/test_script_commands.py::test_rok_measures_it"),
    (r"tools/bench/models\.py", "needs: 30 minutes"),
    (r"tools/bench/states\.py", "needs: 50 minutes"),
    (r"tools/bench/layer_major\.py", "needs: 10 minutes"),
    (r"tools/bench/evaluate\.py",
     "tests/integrations/test_bench_evaluate.py::test_the_table_has_a_line_for_each_way"),
    (r"examples/rl/remax\.py",
     "tests/integrations/test_bench_evaluate.py::test_remax_has_the_same_bits_without_offload"),
    (r"tools/bench/boundary\.py",
     "tests/behaviour/test_layer_major_memory.py::test_the_table_has_a_line_for_each"),
    (r"megatron-offload doctor", "tests/unit/test_doctor.py::test_a_directory_is_taken_for_ssd"),
    (r"megatron-offload plan .*--parameter-offload",
     "tests/unit/test_plan_schedules.py::test_both_orders_stand_side_by_side"),
    (r"megatron-offload plan",
     "tests/unit/test_plan_command.py::test_a_plan_stands_beside_what_else_could_be_done"),
    (r"megatron-offload rok", "tests/unit/test_rok.py::test_the_trainer_itself"),
    (r"megatron-offload estimate",
     "tests/unit/test_estimate.py::test_the_tables_are_within_100_columns_and_the_file_has_all"),
    (r"tools/check/estimate_against_runs\.py",
     "tests/unit/test_check_estimate.py::test_a_training_takes_what_is_estimated"),
    (r"tools/check/estimate_against_gpu\.py",
     "tests/unit/test_check_estimate.py::test_estimates_are_within_a_tenth_of_what_gpus_took"),
    (r"megatron-offload longest --hardware",
     "tests/unit/test_longest.py::test_each_step_against_memory_makes_more_fit_on_a_gpu"),
    (r"megatron-offload longest",
     "tests/integrations/test_script_commands.py::test_longest_finds_what_fits_with_each_way"),
    (r"megatron-offload tune", "tests/unit/test_tune.py::test_the_trainer_itself"),
    (r"megatron-offload report .*--html",
     "tests/unit/test_html_report.py::test_a_page_has_the_table_and_a_picture_of_each_figure"),
    (r"megatron-offload report",
     "tests/unit/test_report_command.py::test_runs_are_compared_with_the_first"),
    (r"tools/preprocess_data\.py .*--split-sentences",
     "tests/unit/test_preprocess_data.py::test_split_sentences_makes_one_sequence_per_sentence"),
    (r"tools/preprocess_data\.py",
     "tests/unit/test_preprocess_data.py::test_text_comes_back_exactly"),
    (r"tools/compare_placements\.py",
     "tests/unit/test_compare_placements.py::test_a_whole_comparison"),
    (r"tools/write_flags\.py", "tests/unit/test_docs.py::test_the_flags_page_is_up_to_date"),
    (r"tools/write_refusals\.py",
     "tests/unit/test_docs.py::test_the_page_of_refusals_is_up_to_date"),
    (r"tools/write_replay\.py",
     "tests/unit/test_docs.py::test_the_tables_of_replay_are_up_to_date"),
    (r"tools/check/auto_on_device\.py", "needs: 45 minutes"),
    (r"tools/check/states_in_a_cgroup\.py",
     "tests/behaviour/test_states_in_a_cgroup.py::test_killed_in_memory_trained_on_the_ssd"),
    (r"tools/check/lora_in_a_cgroup\.py", "needs: minutes"),
    (r"tools/check/longest_in_a_cgroup\.py", "needs: 45 minutes"),
    (r"tools/bench/hooks\.py", "needs: minutes"),
    (r"tools/bench/replay\.py", "needs: minutes"),
    (r"tools/bench/long\.py", "needs: 14 minutes"),
    (r"tools/bench/frozen\.py",
     "tests/integrations/test_bench_frozen.py::test_a_small_measurement"),
    (r"tools/bench/judged_codecs\.py",
     "tests/integrations/test_judged_codecs.py::test_a_small_measurement"),
    (r"tools/bench/codecs\.py",
     "tests/integrations/test_bench_codecs.py::test_a_small_measurement"),
    (r"tools/bench/codec_bytes\.py", "needs: minutes"),
    (r"tools/bench/codec_training\.py",
     "tests/integrations/test_bench_codecs.py::test_small_trainings"),
    (r"tools/bench/launch\.py", "tests/unit/test_bench_launch.py::test_a_small_measurement"),
    (r"megatron-offload bench", "tests/unit/test_bench.py::test_a_tiny_benchmark"),
    (r"tools/plot/overlap\.py", "tests/unit/test_docs.py::test_steps_can_be_drawn"),
    (r"tools/check/soak\.py", "tests/unit/test_check_soak.py::test_a_tiny_soak"),
    (r"tools/check/families\.py", "tests/integrations/test_families.py::"
     "test_a_family_trains_the_same_or_is_refused"),
    (r"tools/bench/loss\.py", "tests/unit/test_bench_loss.py::test_a_small_measurement"),
    (r"tools/plot/losses\.py", "tests/unit/test_bench_loss.py::test_two_trainings_are_drawn"),
    (r"tools/plot/gpu\.py", "tests/unit/test_docs.py::test_the_picture_of_gpus_can_be_drawn"),
    (r"tools/plot/placements\.py", "tests/unit/test_docs.py::test_the_picture_can_be_drawn"),
    (r"tools/apply_patches\.py",
     "tests/unit/test_apply_patches.py::"
     "test_applied_twice_is_applied_once_and_reverted_is_as_before"),
    (r"^for patch in .*(git apply|patch -p1)",
     "tests/unit/test_apply_patches.py::test_by_hand_gives_the_same_bytes"),
)  # fmt: skip


class Block(NamedTuple):
    """Fenced lines of a page."""

    page: Path
    line: int  # of the fence
    language: str
    text: str


class Command(NamedTuple):
    """A command of a page, on one line."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"

    @property
    def words(self) -> list[str]:
        """Without the environment in front and the comment behind."""
        words = shlex.split(self.text, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        return words


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    """The fenced blocks; indented ones begin with four spaces after an empty line."""
    fence: tuple[int, str] | None = None
    inside: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if fence is not None and line.strip() == "```":
            yield Block(page, *fence, "\n".join(inside))
            fence, inside = None, []
        elif fence is not None:
            inside.append(line)
        elif line.startswith("```"):
            fence = number, line.removeprefix("```").strip()
        elif line.startswith("    ") and not lines[number - 2].strip():
            rest = lines[number - 1 :]
            end = next((n for n, one in enumerate(rest) if one and one[:4] != "    "), len(rest))
            yield Block(page, number - 1, "indented", "\n".join(one[4:] for one in rest[:end]))
    assert fence is None, f"{page}: the block of line {fence} has no end"


def commands_in(block: Block) -> Iterator[Command]:
    """One for each line, with those that a backslash continues."""
    start, text = 0, ""
    for number, line in enumerate(block.text.splitlines(), start=block.line + 1):
        start = start or number
        text += line.strip()
        if text.endswith("\\"):
            text = text.removesuffix("\\")
            continue
        if text and not text.startswith("#"):
            yield Command(block.page, start, text)
        start, text = 0, ""


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]
ALL_COMMANDS = [one for block in BLOCKS if block.language == "bash" for one in commands_in(block)]


def row_of(command: str) -> tuple[str, str] | None:
    return next((row for row in COMMANDS if re.search(row[0], command)), None)


# -- Commands -----------------------------------------------------------------------------------


def test_every_block_says_what_it_is() -> None:
    """A command in a block of another kind would go unnoticed."""
    # Made by the test of the matrix.
    blocks = [one for one in BLOCKS if one.page.name != "matrix.md"]
    wrong = [f"{one.page.name}:{one.line}" for one in blocks if one.language not in LANGUAGES]
    assert not wrong, f"fence these blocks, as one of {sorted(LANGUAGES)}: {wrong}"
    looks_like_one = re.compile(
        r"^(\./|\.venv/|python|pip|pytest|torchrun|megatron-offload) ?\S", re.M
    )
    wrong = [
        f"{one.page.name}:{one.line}"
        for one in blocks
        if one.language == "text" and looks_like_one.search(one.text)
    ]
    assert not wrong, f"these are commands and no output: {wrong}"


def test_settings_can_be_read() -> None:
    blocks = [one for one in BLOCKS if one.language == "toml"]
    assert blocks
    for one in blocks:
        assert any(read_settings(tomllib.loads(one.text)).values()), f"{one.page.name}:{one.line}"


def test_the_curve_is_shown_as_the_command_shows_it() -> None:
    """Its tables are made of the measurements that are committed beside the page."""
    folder = ROOT / "docs" / "results"
    result = Result.load(folder / "rok-150MBps.json")
    tables = f"{measurements_table(result.measured)}\n\n{verdict_table(result.verdicts)}"
    assert f"```text\n{tables}\n```" in (folder / "rok.md").read_text()
    assert max(map(len, tables.splitlines())) <= 100


def test_every_command_is_run_by_a_test_or_says_what_it_needs() -> None:
    missing = [str(one) for one in ALL_COMMANDS if row_of(one.text) is None]
    assert not missing, "\n".join(["add to COMMANDS of this file:", *missing])
    assert len(ALL_COMMANDS) > 50


def test_every_row_is_of_use() -> None:
    used = {row_of(one.text) for one in ALL_COMMANDS}
    idle = [
        pattern for pattern, _ in COMMANDS if not any(row and row[0] == pattern for row in used)
    ]
    assert not idle, f"no command looks like {idle}"


@pytest.mark.parametrize("how", sorted({how for _, how in COMMANDS}))
def test_the_tests_that_run_commands_are_there(how: str) -> None:
    if how.startswith("needs: "):
        assert len(how) > len("needs: ")
        return
    path, _, name = how.partition("::")
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    assert name in [node.name for node in nodes if isinstance(node, ast.FunctionDef)]


class _ParsedError(Exception):
    """The flags were understood, and the program is not to go on."""


@pytest.fixture
def only_parses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Runs a program until it has parsed its flags, and fails where it does not get there."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_leave(self: argparse.ArgumentParser, args=None, namespace=None) -> None:  # type: ignore[no-untyped-def]
        parse(self, args, namespace)
        raise _ParsedError

    def run(program: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_leave)
            with pytest.raises(_ParsedError):
                program()

    return run


def _flags_of_launch(words: Sequence[str]) -> None:
    """torchrun's are understood by torchrun, and ours by us; the script's are Megatron-LM's."""
    started = get_args_parser().parse_args(list(words))
    assert started.training_script == "megatron.offload.launch" and started.module
    parser = argparse.ArgumentParser(allow_abbrev=False)
    OffloadConfig.add_arguments(parser)
    ours, others = parser.parse_known_args(started.training_script_args[1:])
    assert isinstance(OffloadConfig.from_args(ours), OffloadConfig)
    assert not [word for word in others if word.startswith("--activation-")]


def _put_back_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


def _main_of(path: Path, arguments: Sequence[str]) -> Callable[[], object]:
    """A tool's `main`, with these arguments on the command line."""

    def run() -> object:
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))  # as `python SCRIPT` does
        return runpy.run_path(str(path), run_name="tool")["main"]()

    return run


def _program_of(words: Sequence[str]) -> Callable[[], object] | None:
    """What parses the flags of a command; None: not one of ours."""
    program, rest = words[0], list(words[1:])
    if program.endswith("python") and rest[0].startswith("tools/"):
        return _main_of(ROOT / rest[0], rest[1:])
    if program.startswith("tools/") and program.endswith(".py"):
        return _main_of(ROOT / program, rest)
    if program.endswith("megatron-offload"):
        return functools.partial(cli.main, rest)
    if re.search(r"examples/pretrain_\w+\.sh$", program):
        if "--help" in rest:
            return None
        adders = (add_offload_arguments, add_expert_arguments)
        return functools.partial(parse_arguments, "", rest, adders)
    return None


def test_the_flags_of_commands_are_understood(
    only_parses: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_back_at_the_end(monkeypatch)
    num_parsed = 0
    for command in ALL_COMMANDS:
        words = command.words
        try:
            if "torchrun" in words:
                _flags_of_launch(words[words.index("torchrun") + 1 :])
            elif (program := _program_of(words)) is not None:
                only_parses(program)
            else:
                continue
        except (SystemExit, Exception) as error:
            raise AssertionError(f"{command}\nis not understood: {error!r}") from error
        num_parsed += 1
    assert num_parsed > 40


@pytest.mark.parametrize(
    "words",
    [
        ["megatron-offload", "doctor", "--no-such-flag"],
        ["python", "tools/write_flags.py", "--no-such-flag"],
        ["./examples/pretrain_gpt.sh", "--activation-offload", "tape"],
    ],
)
def test_flags_that_are_not_there_are_noticed(
    words: list[str],
    only_parses: Callable[[Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _put_back_at_the_end(monkeypatch)
    program = _program_of(words)
    assert program is not None
    with pytest.raises(SystemExit) as left:
        only_parses(program)
    assert left.value.code == 2


def test_files_that_commands_name_are_there() -> None:
    """Programs, settings and tests; what a command writes or a person brings may be missing."""
    missing = []
    for command in ALL_COMMANDS:
        for word in command.words:
            if re.match(rf"(\./)?({TOP_FOLDERS})/", word) and not list(ROOT.glob(word)):
                missing.append(f"{command}: {word}")
    assert not missing, "\n".join(missing)


def test_options_of_pytest_are_there() -> None:
    ours = "".join(path.read_text() for path in ROOT.glob("tests/**/conftest.py"))
    for command in ALL_COMMANDS:
        if "pytest" in command.words:
            for word in command.words:
                assert not word.startswith("--") or f'"{word}"' in ours, command


@pytest.mark.slow
def test_the_first_command_checks_its_flags_and_starts() -> None:
    """`./examples/pretrain_gpt.sh` up to the point where training would begin."""
    done = subprocess.run(
        ["./examples/pretrain_gpt.sh", "--train-iters", "20", "--mock-data", "--validate-only"],
        cwd=ROOT,
        env={**os.environ, "MEGATRON_OFFLOAD_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_steps_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [str(ROOT / f"docs/results/{name}.json") for name in ("overlap-before", "overlap")]
    flags = ["--names", "before,now", "--tier", "ssd", "--output", str(tmp_path / "a.svg")]
    _put_back_at_the_end(monkeypatch)
    assert _main_of(ROOT / "tools/plot/overlap.py", [*results, *flags])() == 0
    drawn = (tmp_path / "a.svg").read_text()
    for title in ("before, ssd: compute is idle 5.5%", "now, ssd: compute is idle 0.5%"):
        assert f"<!-- {title}" in drawn
    assert "<!-- the device computes -->" in drawn and "<!-- drive 4 -->" in drawn


def test_the_picture_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [str(ROOT / f"docs/results/placements-{one}.json") for one in ("h512-24layers",)]
    tool = ROOT / "tools/plot/placements.py"
    _put_back_at_the_end(monkeypatch)
    assert _main_of(tool, [*results, "--output", str(tmp_path / "a.png")])() == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_picture_of_gpus_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [str(ROOT / f"docs/results/gpu/{one}/results.json") for one in ("h100", "h200")]
    tool = ROOT / "tools/plot/gpu.py"
    _put_back_at_the_end(monkeypatch)
    picture = tmp_path / "gpus.svg"
    assert _main_of(tool, [*results, "--output", str(picture)])() == 0
    drawn = picture.read_text()
    assert drawn.count("<!-- gradient checkpointing -->") == 2 == drawn.count("<!-- auto -->")
    wrong = str(ROOT / "docs/results/frozen.json")
    with pytest.raises(SystemExit):
        _main_of(tool, [wrong, "--output", str(picture)])()
    assert "is no result of gpu_day.py" in capsys.readouterr().err


def test_python_in_the_docs_compiles_and_imports_what_is_there() -> None:
    blocks = [block for block in BLOCKS if block.language == "python"]
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{block.page.name}: {alias.name}"


def test_the_engines_example_runs() -> None:
    """The one for a model without Megatron, on a model whose activations are large enough to go."""
    (block,) = [one for one in BLOCKS if one.language == "python" and "OffloadEngine(" in one.text]
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": torch.randn(2, 1024, 512),
    }
    before = [parameter.detach().clone() for parameter in model.parameters()]
    exec(compile(block.text, f"{block.page}:{block.line}", "exec"), names)
    assert names["engine"].statistics.offloaded_bytes > 0  # type: ignore[attr-defined]
    assert not any(map(torch.equal, before, model.parameters()))


# -- Pages --------------------------------------------------------------------------------------


def test_the_flags_page_is_up_to_date() -> None:
    assert FLAGS_PAGE.read_text() == flags_page(), "run tools/write_flags.py"


def test_the_keywords_are_up_to_date() -> None:
    assert KEYWORDS.read_text() == keywords_file(), "run tools/write_flags.py"


def test_the_page_of_refusals_is_up_to_date() -> None:
    assert REFUSALS_PAGE.read_text() == refusals_page(), "run tools/write_refusals.py"


def test_the_tables_of_replay_are_up_to_date() -> None:
    assert REPLAY_PAGE.read_text() == replay_page(), "run tools/write_replay.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """What a link to a heading of the page may name, as GitHub makes it."""
    anchors: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{anchors.count(anchor)}" if anchor in anchors else anchor)
    return set(anchors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", prose_of(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"https?:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors_of(target):
            broken.append(f"{link}: there is no such heading; {sorted(anchors_of(target))}")
    assert not broken, "\n".join(broken)


def test_files_that_the_text_names_are_there() -> None:
    places = [ROOT / place for place in (".", "megatron/offload", "megatron/offload/planner")]
    names = {path.name for path in ROOT.glob("[!.]*/**/*.*")}
    missing = []
    for page in PAGES:
        if page.parent.name == "patches":  # speaks of Megatron's files
            continue
        for name in re.findall(r"`([\w./*-]+)`", prose_of(page)):
            is_source = re.search(r"\.(py|sh|sbatch|yaml|md)$", name)
            if name in NOT_OURS or not (is_source or re.match(f"({TOP_FOLDERS})/", name)):
                continue
            is_here = any(list(place.glob(name)) for place in (*places, page.parent))
            if not is_here and ("/" in name or name not in names):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    for block in BLOCKS:  # the drawing
        if block.page.name == "architecture.md":
            for name in re.findall(r"\b[\w/]+\.py\b", block.text):
                package = ROOT / "megatron/offload"
                if not any((at / name).exists() for at in (package, package / "activations")):
                    missing.append(f"{block.page.name}:{block.line}: {name}")
    assert not missing, "\n".join(missing)


def test_tests_that_the_text_names_are_there() -> None:
    """`docs/gpu.md` says of each line which test shows it."""
    source = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    defined = set(re.findall(r"^ *def (test_\w+)", source, flags=re.M))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", prose_of(page))}
    assert len(named) > 40 and not named - defined


def test_the_order_of_pages_leaves_none_out() -> None:
    """Every page of docs/ is reached by links from the README."""
    reached, to_read = set(), [ROOT / "README.md"]
    while to_read:
        page = to_read.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in re.findall(r"\]\(([^()\s#]+\.md)(?:#[^()\s]*)?\)", prose_of(page)):
            if not link.startswith("http"):
                to_read.append((page.parent / link).resolve())
    assert reached >= set(PAGES)
