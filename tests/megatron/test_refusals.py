# SPDX-License-Identifier: Apache-2.0
"""Every combination that is refused: one sentence, exit code 2, before anything is built.

One row is one refusal. The sources are searched for the statements that refuse; one that no row of
the table reaches fails the test, so that a new refusal comes with its row.
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
from launch import ROOT, TINY, run_trainer
from megatron.core.transformer.transformer_config import TransformerConfig
from trainer.gpt import GPT
from trainer.start import start
from trainer.training import pretrain

from megatron.offload import ConfigurationError, OffloadConfig, launch
from megatron.offload.integration.megatron import cpu_training_script, install
from megatron.offload.integration.megatron.install import _REFUSED_SETTINGS, _REFUSED_WRAPPERS
from megatron.offload.integration.megatron.training_script import _FLAGS
from tests.megatron_lm import FakeMegatronLm
from tests.megatron_lm import settings as launcher_settings

SSD = "--activation-offload ssd --activation-offload-dir {tmp}"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
MEGATRON = "megatron/offload/integration/megatron"


@dataclasses.dataclass(frozen=True)
class Row:
    """One refused combination.

    Attributes:
        flags: added to the tiny model's; `{tmp}` is a directory.
        sentence: what the one line says.
        world_size: as if so many ranks had been started.
        settings: put into the TransformerConfig that the flags make, where no flag does it.
        patches: attributes, by import path, that differ.
    """

    flags: str
    sentence: str
    world_size: int = 1
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    patches: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.flags.replace("{tmp}", "DIR"), *map(str, self.settings)])


# What `check_settings` refuses, on every way to it.
SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"cpu_offloading": True}, "drop --cpu-offloading"),
    (
        {"fine_grained_activation_offloading": True},
        "drop --fine-grained-activation-offloading",
    ),
    ({"distribute_saved_activations": True}, "drop --distribute-saved-activations"),
    ({"overlap_moe_expert_parallel_comm": True}, "drop --overlap-moe-expert-parallel-comm"),
    ({"enable_cuda_graph": True}, "drop --enable-cuda-graph"),
    ({"external_cuda_graph": True}, "drop --external-cuda-graph"),
    ({"hybrid_context_parallel": True}, "drop --hybrid-context-parallel"),
    ({"moe_paged_stash": True}, "drop --moe-paged-stash"),
    (
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        "drop --overlap-dispatch-backward-with-experts-wgrad",
    ),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl local cannot be combined with offload"),
    ({"cuda_graph_impl": "transformer_engine"}, "drop --cuda-graph-impl"),
    ({"cuda_graph_impl": "full_iteration"}, "drop --cuda-graph-impl"),  # 0.19
    ({"recompute_granularity": "full"}, "--recompute-granularity full leaves no activations"),
)
OTHER_VERSION = {"megatron.core.__version__": "0.99.0"}

OFFLOAD = (
    *(Row(SSD, sentence, settings=settings) for settings, sentence in SETTINGS),
    Row(
        f"{SSD} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "leaves no activations to offload; drop one of the two",
    ),
    Row(
        f"{SSD} --activation-recompute-layers 1",
        "cannot recompute layers that compute in fp8",
        settings={"fp8": "hybrid"},
    ),
    Row(
        f"{SSD} --activation-recompute-layers 1",
        "cannot recompute layers that compute in fp4",
        settings={"fp4": "e2m1"},
    ),
    Row(
        f"{SSD} --activation-recompute-layers 1",
        "cannot recompute layers whose routing is replayed",
        settings={"moe_enable_routing_replay": True},
    ),
    Row(f"{SSD} --activation-offload-layers 1-5", "--activation-offload-layers names layer 5"),
    Row(f"{SSD} --activation-recompute-layers 5", "--activation-recompute-layers names layer 5"),
    Row(SSD, "megatron-core 0.99.0 is not supported", patches=OTHER_VERSION),
    Row("--activation-offload ssd", "--activation-offload ssd needs a place on an SSD"),
    Row("--activation-offload tiered", "--activation-offload tiered needs a place on an SSD"),
    Row(
        f"{SSD} --activation-offload-io gds --activation-offload-verify checksum",
        "--activation-offload-verify checksum reads every byte in host memory",
    ),
    Row("--activation-recompute-layers 1", "--activation-recompute-layers needs"),
    Row(
        f"{SSD} --activation-recompute-layers 1-3 --activation-offload-layers 2",
        "both name 2; take it out of one of them",
    ),
    Row(f"{SSD},{{tmp}}", "names a directory twice"),
    Row(f"{SSD} --activation-offload-inflight 1KiB", "is below --activation-offload-min-bytes"),
    Row("--activation-offload-min-bytes 1apple", "'1apple' is not a size"),
    Row("--activation-offload-write-limit 0", "'0' lets nothing through"),
    Row("--activation-offload-host-budget 1.5", "1.5 is neither a fraction nor a size"),
    Row("--activation-offload-threads many", "'many' is not a whole number"),
    Row("--activation-offload-threads 0", "0 is not allowed; the smallest value is 1"),
    Row("--activation-offload-layers 0", "'0' names no layers"),
    Row("--activation-offload tape", "invalid choice: 'tape'"),
)
VIRTUAL = f"{PP2} --num-layers-per-virtual-pipeline-stage"
TRAINER = (
    Row("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    Row("--num-layers none", "expected a positive whole number, got 'none'"),
    Row("--hidden-dropout 1.0", "expected a probability in [0, 1), got '1.0'"),
    Row("--split 1,x", "expected up to three weights"),
    Row(TP2, "world size (3) must be divisible by tensor (2)", 3),
    Row(PP2, "world size (1) must be divisible by"),
    Row(f"{PP2} --num-layers 5", "--num-layers (5)", 2),
    Row("--num-attention-heads 6", "--hidden-size (64) must be divisible by"),
    Row("--tensor-model-parallel-size 8", "--num-attention-heads (4)", 8),
    Row("--group-query-attention --num-query-groups 3", "--num-query-groups (3)"),
    Row(f"{TP2} --group-query-attention", "--num-query-groups (1) must be divisible by", 2),
    Row(f"{TP2} --ffn-hidden-size 5", "--ffn-hidden-size (5)", 2),
    Row(f"{TP2} --sequence-parallel --seq-length 33", "--seq-length (33)", 2),
    Row("--sequence-parallel", "--sequence-parallel needs --tensor-model-parallel-size"),
    Row(f"{VIRTUAL} 3", "layers per pipeline stage (2) must be divisible", 2),
    Row(
        "--num-layers-per-virtual-pipeline-stage 1",
        "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size",
    ),
    Row(f"{VIRTUAL} 1 --global-batch-size 3", "micro-batches per step (3)", 2),
    Row("--global-batch-size 5 --micro-batch-size 2", "--global-batch-size (5)"),
    Row("--global-batch-size 3", "--micro-batch-size x data-parallel size (2)", 2),
    Row("--max-position-embeddings 16", "must not exceed --max-position-embeddings"),
    Row("--min-lr 1", "--min-lr (1.0) must not exceed --lr"),
    Row("--lr-warmup-iters 200", "--lr-warmup-iters (200)"),
    Row("--recompute-granularity full", "needs --recompute-method"),
    Row("--recompute-num-layers 1", "--recompute-num-layers need --recompute-granularity full"),
    Row("--recompute-modules core_attn", "needs --recompute-granularity selective"),
    Row(
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-modules mlp needs --disable-bias-linear",
    ),
    *(
        Row(
            f"--recompute-granularity selective --recompute-modules core_attn {name}",
            f"--recompute-modules {name} needs layers that this trainer does not build",
        )
        for name in ("moe_act", "mla_up_proj")
    ),
    Row("--overlap-param-gather", "needs --use-distributed-optimizer"),
    Row("--data-path corpus", "give either --data-path PREFIX or --mock-data"),
    Row("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model"),
    Row(
        "--dataloader-type dali",
        "needs NVIDIA DALI, which is not installed",
        patches={"trainer.arguments._has_dali": lambda: False},
    ),
)
MOE = "--num-experts 4 --disable-bias-linear"
EP2 = "--expert-model-parallel-size 2"
LAYOUT = (
    Row("--context-parallel-size 2", "--context-parallel-size needs the attention of", 2),
    Row(EP2, "--expert-model-parallel-size needs --num-experts", 2),
    Row(
        "--recompute-granularity selective --recompute-modules shared_experts",
        "--recompute-modules shared_experts needs --num-experts",
    ),
    Row("--num-experts 4", "--num-experts needs --disable-bias-linear"),
    Row(f"{MOE} --num-experts 3 {EP2}", "--num-experts (3) and the data-parallel size (2)", 2),
    Row(f"{MOE} {EP2}", "the data-parallel size (1) must be divisible by"),
    Row(f"{MOE} --moe-router-topk 5", "--moe-router-topk (5) must not exceed --num-experts (4)"),
    Row(
        f"{MOE} --recompute-granularity selective --recompute-modules shared_experts",
        "--recompute-modules shared_experts needs --moe-shared-expert-intermediate-size",
    ),
    Row(f"{MOE} {TP2}", "--num-experts with tensor parallelism needs --sequence-parallel", 2),
    Row(f"{MOE} {EP2} --save {{tmp}}", "--save and --load are not there for", 2),
)
TABLE = (*OFFLOAD, *TRAINER, *LAYOUT)

# Where refusals stand: the file, and the functions in it that are tested elsewhere.
SEARCHED = {
    "megatron/offload/config.py": (),
    "megatron/offload/layer_set.py": (),
    f"{MEGATRON}/install.py": ("check_wrappers",),  # below: it needs a model
    "examples/trainer/experts.py": (),
    "examples/trainer/arguments.py": ("check_megatron_core_version",),  # in test_trainer_errors.py
}
_REFUSING_CALLS = ("_require", "_divides")
_REFUSING_ERRORS = ("ConfigurationError", "UserError", "ArgumentTypeError")


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


def test_the_tiny_model_with_offload_is_not_refused(tmp_path: Path) -> None:
    """Else the rows above would be refused for whatever the tiny model lacks."""
    outcome = run_trainer(TINY, SSD.format(tmp=tmp_path), "--validate-only")
    assert outcome.exit_codes == [0], outcome.output


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
    [("megatron/offload/config.py", 12), ("examples/trainer/arguments.py", 25)],
)
def test_the_search_finds_statements(path: str, number: int) -> None:
    assert len(statements_that_refuse(ROOT / path, ())) >= number


def test_every_refused_setting_has_a_row() -> None:
    tested = {name for settings, _ in SETTINGS for name in settings}
    assert set(_REFUSED_SETTINGS) <= tested


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


def test_every_refused_flag_of_megatron_lm_has_a_row() -> None:
    assert FLAGS.keys() == _FLAGS.keys()
    assert all(FLAGS[name] != works for name, (works, _) in _FLAGS.items())


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
        ({}, {name: value}, {}, f"--{name.replace('_', '-')} cannot be combined with offload")
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
