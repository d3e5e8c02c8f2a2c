# SPDX-License-Identifier: Apache-2.0
"""Every combination that is refused: one sentence, exit code 2, before anything is built.

The table is in `refused.py`. The sources are searched for the statements that refuse; one that no
row reaches fails the test, so that a new refusal comes with its row.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import logging
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from trainer.gpt import GPT
from trainer.start import start
from trainer.training import pretrain

from megatron.offload import ConfigurationError, OffloadConfig, launch
from megatron.offload.integration.megatron import cpu_training_script, install
from megatron.offload.integration.megatron import refused as tables
from megatron.offload.integration.megatron.connect import _REFUSED_WRAPPERS
from tests.megatron.refused import (
    LOSS_SETTINGS,
    OFFLOAD,
    OTHER_VERSION,
    SETTINGS,
    SSD,
    STEPS_SETTINGS,
    TABLE,
    Row,
)
from tests.support.launch import TINY, run_trainer
from tests.support.megatron_lm import FakeMegatronLm
from tests.support.megatron_lm import settings as launcher_settings
from tests.support.processes import ROOT

MEGATRON = "megatron/offload/integration/megatron"
# Where refusals stand: the file, and the functions in it that are tested elsewhere.
SEARCHED = {
    "megatron/offload/config.py": (),
    # In tests/unit/test_settings.py and test_config.py: for who gives no flags.
    "megatron/offload/flag.py": (
        *("from_settings", "of_door", "__post_init__", "_checked", "speaking_of_settings"),
    ),
    "megatron/offload/layer_set.py": (),
    "megatron/offload/tier_settings.py": (),
    "megatron/offload/sizes.py": (),
    "megatron/offload/states/config.py": (),
    f"{MEGATRON}/connect.py": ("check_wrappers",),  # below: it needs a model
    f"{MEGATRON}/recomputable.py": (),
    f"{MEGATRON}/chunked_loss.py": (),
    f"{MEGATRON}/tiled_mlps.py": ("_refuse",),  # in test_tiled_mlp.py: it needs a model
    # In tests/unit/test_layer_major.py: they need a model, and a step.
    f"{MEGATRON}/layer_major.py": ("only_chunk", "states", "elsewhere"),
    "megatron/offload/layer_major/config.py": (),
    "examples/trainer/experts.py": (),
    "examples/trainer/arguments.py": ("check_megatron_core_version",),  # in test_trainer_errors.py
}
_REFUSING_CALLS = ("_require", "_divides")
_REFUSING_ERRORS = ("ConfigurationError", "UserError", "ArgumentTypeError", "refusal")


def statements_that_refuse(path: Path, elsewhere: tuple[str, ...]) -> dict[int, range]:
    """Lines of each statement by its first one."""
    found = {}
    functions = [ast.parse(path.read_text())]
    while functions:
        for node in ast.iter_child_nodes(functions.pop()):
            if isinstance(node, ast.FunctionDef) and node.name in (*_REFUSING_CALLS, *elsewhere):
                continue
            functions.append(node)  # type: ignore[arg-type]
            call: ast.expr | None = None
            if isinstance(node, ast.Raise):
                call = node.exc
            elif isinstance(node, ast.Expr):
                call = node.value
            names = _REFUSING_ERRORS if isinstance(node, ast.Raise) else _REFUSING_CALLS
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in names:
                found[node.lineno] = range(node.lineno, (node.end_lineno or 0) + 1)
    return found


def reached(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """Files and lines that an error, and what it was raised for, went through."""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            yield frame.filename, frame.lineno or 0
        error = error.__context__


class _GPT(GPT):
    """GPT with settings that the trainer has no flags for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def transformer_config(self, args: argparse.Namespace) -> TransformerConfig:
        config = super().transformer_config(args)
        # Not by the constructor, which refuses some without a GPU or Transformer Engine.
        vars(config).update(self.settings)
        return config


def refuse(row: Row, directory: Path) -> SystemExit:
    """Runs the trainer's checks in this process as rank 0; returns how it ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", str(row.world_size))
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        for name, value in row.patches.items():
            patch.setattr(name, value)
        flags = f"{TINY} {row.flags.format(tmp=directory)} --validate-only"
        with pytest.raises(SystemExit) as left:
            pretrain(_GPT(row.settings), shlex.split(flags))
    return left.value


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_what_is_refused_is_one_sentence_and_exit_code_2(
    row: Row, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert refuse(row, tmp_path).code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and ": error: " in line
    assert row.sentence in line
    # A refused setting is named, and there is something to do about it.
    assert all(name in line or name.replace("_", "-") in line for name in row.settings)


@pytest.mark.slow
def test_the_tiny_model_with_offload_is_not_refused(tmp_path: Path) -> None:
    """Else the rows above would be refused for whatever the tiny model lacks."""
    outcome = run_trainer(TINY, SSD.format(tmp=tmp_path), "--validate-only")
    assert outcome.exit_codes == [0], outcome.output


@pytest.mark.slow
def test_all_ranks_leave_and_one_says_what_is_refused(tmp_path: Path) -> None:
    row = next(row for row in OFFLOAD if "names a directory twice" in row.sentence)
    outcome = run_trainer(TINY, row.flags.format(tmp=tmp_path), world_size=2)
    assert outcome.exit_codes == [2, 2]
    assert outcome.output.count("error: ") == 1 and row.sentence in outcome.errors
    assert outcome.metrics == []


def test_every_statement_that_refuses_has_a_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = set()
    for row in TABLE:
        lines.update(reached(refuse(row, tmp_path)))
    with pytest.raises(ConfigurationError, match="choose one of off") as refused:
        OffloadConfig(mode="tape")  # argparse is faster where it is a flag
    lines.update(reached(refused.value))
    capsys.readouterr()
    missing = [
        f"{path}:{first}"
        for path, elsewhere in SEARCHED.items()
        for first, statement in statements_that_refuse(ROOT / path, elsewhere).items()
        if not any((str(ROOT / path), line) in lines for line in statement)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("path", "number"),
    [("megatron/offload/config.py", 10), ("examples/trainer/arguments.py", 25)],
)
def test_the_search_finds_statements(path: str, number: int) -> None:
    assert len(statements_that_refuse(ROOT / path, ())) >= number


def test_every_refused_setting_has_a_row() -> None:
    tested = {name for settings, _ in SETTINGS for name in settings}
    assert set(tables.ACTIVATIONS.settings) <= tested
    of_loss = {name for settings, _ in LOSS_SETTINGS for name in settings}
    assert set(tables.CHUNKED_LOSS.settings) <= of_loss
    in_steps = {name for settings in STEPS_SETTINGS for name in settings}
    assert set(tables.STEPS.settings) <= in_steps


# Of TransformerConfig: what may move or freeze activations by its name, and does not.
_DETAILS = {
    # of what is refused above
    "cpu_offloading_num_layers",
    "_cpu_offloading_context",
    "cpu_offloading_activations",
    "cpu_offloading_weights",
    "cpu_offloading_double_buffering",
    "offload_modules",
    "min_offloaded_tensor_size",
    "cuda_graph_use_single_mempool",
    "cuda_graph_retain_backward_graph",
    "cuda_graph_warmup_steps",
    "cuda_graph_scope",
    # refused together with recomputed layers
    "moe_enable_routing_replay",
    # works together with offload
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_layer_recompute",
}


def test_this_megatron_core_has_no_setting_of_that_kind_that_nobody_has_looked_at() -> None:
    kind = re.compile("offload|graph|recompute|replay|stash|saved_act|hybrid_context|overlap_moe")
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    found = {name for name in names if kind.search(name)}
    refused = {name for settings, _ in SETTINGS for name in settings}
    assert found - refused == _DETAILS


# ------------------------------------------------------------------ install, with a model


@pytest.mark.parametrize(("settings", "sentence"), SETTINGS, ids=str)
def test_install_refuses_settings_too(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    module = torch.nn.Linear(2, 2)
    module.config = argparse.Namespace(**settings)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError) as refused:
        install(OffloadConfig(mode="ssd", directories=(tmp_path,)), [module])
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", _REFUSED_WRAPPERS)
def test_install_refuses_sharded_parameters(name: str, tmp_path: Path) -> None:
    class Outer(torch.nn.Module):
        config = argparse.Namespace()

        def __init__(self) -> None:
            super().__init__()
            self.module = type(name, (torch.nn.Linear,), {})(2, 2)

    with pytest.raises(ConfigurationError, match=f"{name} cannot be combined with offload"):
        install(OffloadConfig(mode="ssd", directories=(tmp_path,)), [Outer()])


# ------------------------------------------------------------------ the launcher

_SCRIPT = """\
import argparse, sys
megatron = {name: sys.modules["megatron.training." + name]
            for name in ("arguments", "global_vars", "training")}
parser = megatron["arguments"].add_megatron_arguments(argparse.ArgumentParser())
parser.parse_args(namespace=megatron["global_vars"].get_args())
megatron["training"].setup_model_and_optimizer(None, "gpt")
"""
FLAGS: dict[str, Any] = {
    "use_legacy_models": True,
    "use_megatron_fsdp": True,
    "use_torch_fsdp2": True,
    "inprocess_restart": True,
    "perform_rl_step": True,
    "gtp_weight_remat_size": 2,
}


@pytest.mark.parametrize("one", tables.ALL.values(), ids=list(tables.ALL))
def test_a_refusal_names_the_setting_the_reason_and_what_to_do(one: tables.Refusals) -> None:
    usual: dict[str, Any] = dict.fromkeys(one.settings, "none")
    usual |= dict.fromkeys(("gtp_weight_remat_size", "num_distributed_optimizer_instances"), 1)
    one.check(argparse.Namespace(**usual))
    one.check(argparse.Namespace(**dict.fromkeys(one.settings, 0)))
    one.check(argparse.Namespace())
    for name in one.settings:
        with pytest.raises(ConfigurationError) as refused:
            one.check(argparse.Namespace(**{**usual, name: "2"}))
        reason, advice = one.why(name)
        assert reason and advice
        assert str(refused.value) == (
            f"{one.prefix}{name} 2 cannot be combined with {one.what}: {reason}; {advice}"
        )


def test_every_refused_flag_of_megatron_lm_has_a_row() -> None:
    assert FLAGS.keys() == tables.LAUNCHER.settings.keys()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMegatronLm]:
    """A Megatron-LM in miniature that the launcher finds, and its process put back afterwards."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(cpu_training_script, "activate", lambda: False)
    logger = logging.getLogger("megatron.offload")
    before = logger.handlers[:], logger.level, logger.propagate
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fake = FakeMegatronLm()
    fake.put(monkeypatch)
    yield fake
    dist.destroy_process_group()
    logger.handlers[:], logger.level, logger.propagate = before


LAUNCHED = [
    *((settings, {}, {}, sentence) for settings, sentence in SETTINGS),
    *(
        ({}, {name: value}, {}, f"{name} cannot be combined with offload")
        for name, value in FLAGS.items()
    ),
    ({}, {}, OTHER_VERSION, "megatron-core 0.99.0 is not supported"),
]


@pytest.mark.parametrize(("settings", "flags", "patches", "sentence"), LAUNCHED, ids=str)
def test_the_launcher_refuses_before_a_model_is_built(
    launcher: FakeMegatronLm,
    settings: dict[str, Any],
    flags: dict[str, Any],
    patches: dict[str, Any],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(_SCRIPT)
    launcher.settings = launcher_settings(**settings)
    vars(launcher.flags).update(flags)
    for name, value in patches.items():
        monkeypatch.setattr(name, value)
    with pytest.raises(SystemExit) as left:
        launch.main([str(script), *SSD.format(tmp=tmp_path).split()])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron.offload.launch: error: ") and sentence in line
    assert launcher.events == []


def test_a_trainer_without_megatron_core_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        start(lambda: None)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("megatron-core is not installed; install megatron-core==0.16.1")
