# SPDX-License-Identifier: Apache-2.0
"""What the launcher does to a training script, against a Megatron-LM in miniature."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from megatron.offload import ConfigurationError, OffloadConfig, cli
from megatron.offload.integration.megatron import training_script, whole_training
from megatron.offload.integration.megatron.training_script import PATCH_POINTS, TrainingScript
from megatron.offload.states.config import StatesConfig
from megatron.offload.stats.metrics_file import MetricsFile, StepRecord
from tests.support.megatron_lm import FakeMegatronLm, Scalars, settings
from tests.support.processes import finish, start_python

STATISTICS = {"offloaded_bytes": 3 << 20, "rejected_bytes": 0, "stall_s": 0.25, "write_wait_s": 0.5}


class FakeOffload:
    """Stands for `MegatronOffload`: writes down what happens."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.statistics = STATISTICS

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.events.append("begin")
        try:
            yield
        finally:
            self.events.append("end")

    def pause(self) -> None:
        self.events.append("pause")

    def summary(self) -> str:
        return "the summary"

    def close(self) -> None:
        self.events.append("close")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def megatron_lm(monkeypatch: pytest.MonkeyPatch) -> FakeMegatronLm:
    fake = FakeMegatronLm()
    fake.settings = settings()
    fake.put(monkeypatch)
    return fake


@pytest.fixture
def script(megatron_lm: FakeMegatronLm) -> Iterator[TrainingScript]:
    connected = TrainingScript()
    connected.connect()
    yield connected
    connected.close()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, megatron_lm: FakeMegatronLm) -> dict[str, Any]:
    """Makes `install` a stand-in, and the model one that it would take; what it was called with."""
    call: dict[str, Any] = {}

    def install(config: OffloadConfig, model_chunks: Any, **kwargs: Any) -> FakeOffload:
        call.update(config=config, model_chunks=model_chunks, **kwargs)
        return FakeOffload(megatron_lm.events)

    monkeypatch.setattr(whole_training, "install", install)
    monkeypatch.setattr(training_script, "_check_blocks", lambda chunks: None)
    return call


def parse(megatron_lm: FakeMegatronLm, *argv: str) -> None:
    """Gives the script its flags, as its own parser reads them."""
    parser = megatron_lm.arguments.add_megatron_arguments(argparse.ArgumentParser())
    parser.parse_args(argv, namespace=megatron_lm.flags)


def set_up(megatron_lm: FakeMegatronLm) -> Any:
    return megatron_lm.training.setup_model_and_optimizer(None, "gpt")


# ------------------------------------------------------------------ flags


def test_the_parser_takes_both_kinds_of_flags(
    megatron_lm: FakeMegatronLm, script: TrainingScript
) -> None:
    parse(megatron_lm, "--micro-batch-size", "3", "--activation-offload", "host")
    assert megatron_lm.flags.micro_batch_size == 3
    assert megatron_lm.flags.activation_offload == "host"


@pytest.mark.usefixtures("one_rank")
def test_flags_reach_install_and_stay_plain_for_checkpoints(
    megatron_lm: FakeMegatronLm, script: TrainingScript, installed: dict[str, Any], tmp_path: Path
) -> None:
    flags = (
        f"--activation-offload ssd --activation-offload-dir {tmp_path} "
        "--activation-offload-layers 1 --activation-recompute-layers decoder.2 "
        f"--activation-offload-trace {tmp_path}/trace --activation-memory-report {tmp_path}/report"
    )
    parse(megatron_lm, *flags.split())
    assert set_up(megatron_lm) == (megatron_lm.model, "optimizer", "scheduler")
    assert installed["config"].directories == (tmp_path,)
    assert installed["model_chunks"] is megatron_lm.model
    assert installed["num_local_ranks"] == 1 and installed["reserve_bytes"] > 0
    plain = (str, int, float, type(None))
    assert all(isinstance(value, plain) for value in vars(megatron_lm.flags).values())
    assert megatron_lm.flags.activation_offload_layers == "1"
    assert megatron_lm.flags.activation_recompute_layers == "decoder.2"


class FakeStates:
    """Stands for `ModelStates`."""

    enabled = True
    statistics: ClassVar = {"bytes": 1 << 20, "memory_bytes": 5}

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.checkpoint = ""

    def note_checkpoint(self, path: str) -> None:
        self.checkpoint = path

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        self.events.append("in files")
        yield
        self.events.append("in memory")

    def close(self, *, restore: bool = True) -> None:
        self.events.append(f"states, restored {restore}")


@pytest.mark.usefixtures("one_rank")
def test_model_states_move_with_activations_and_without(
    megatron_lm: FakeMegatronLm,
    script: TrainingScript,
    installed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    call: dict[str, Any] = {}

    def offload_model_states(config: StatesConfig, optimizer: Any) -> FakeStates:
        call.update(config=config, optimizer=optimizer)
        return FakeStates(megatron_lm.events)

    monkeypatch.setattr(whole_training, "offload_model_states", offload_model_states)
    parse(megatron_lm, "--optimizer-state-offload", "ssd", "--optimizer-state-dir", str(tmp_path))
    megatron_lm.flags.save = str(tmp_path / "checkpoints")
    set_up(megatron_lm)
    assert call["config"].directories == (tmp_path,) and call["optimizer"] == "optimizer"
    assert not installed["config"].enabled
    states = installed["states"]
    assert states.checkpoint == f"the last checkpoint in {tmp_path}/checkpoints"
    plain = (str, int, float, type(None))
    assert all(isinstance(value, plain) for value in vars(megatron_lm.flags).values())
    megatron_lm.tensorboard = Scalars()
    megatron_lm.train(iteration=2)
    assert megatron_lm.tensorboard.values["offload/state_bytes"] == (1 << 20, 2)
    script.close()
    # They are in the checkpoint, and may be more than memory holds.
    assert megatron_lm.events[-2:] == ["close", "states, restored False"]


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch, megatron_lm: FakeMegatronLm) -> None:
    """Makes `offload_model_states` a stand-in that writes down when it is called."""

    def offload_model_states(config: StatesConfig, optimizer: Any) -> FakeStates:
        megatron_lm.events.append(f"states of {optimizer}")
        return FakeStates(megatron_lm.events)

    monkeypatch.setattr(whole_training, "offload_model_states", offload_model_states)


@pytest.mark.usefixtures("one_rank", "moving", "installed")
def test_states_are_on_their_tier_before_a_checkpoint_is_loaded_into_them(
    megatron_lm: FakeMegatronLm, script: TrainingScript, tmp_path: Path
) -> None:
    """Else a run whose states are more than memory could begin and never resume."""
    parse(megatron_lm, "--optimizer-state-offload", "ssd", "--optimizer-state-dir", str(tmp_path))
    megatron_lm.flags.load = megatron_lm.flags.save = str(tmp_path / "checkpoints")
    set_up(megatron_lm)
    assert megatron_lm.events == ["build", "states of optimizer", "in files", "load", "in memory"]
    assert script._offload is not None
    states = script._offload.states
    assert states.checkpoint == f"the last checkpoint in {tmp_path}/checkpoints"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("one_rank", "moving", "installed")
def test_what_is_gathered_for_a_checkpoint_is_in_files(
    megatron_lm: FakeMegatronLm, script: TrainingScript, tmp_path: Path
) -> None:
    parse(megatron_lm, "--optimizer-state-offload", "ssd", "--optimizer-state-dir", str(tmp_path))
    set_up(megatron_lm)
    megatron_lm.events.clear()
    megatron_lm.training.save_checkpoint(
        1, megatron_lm.model, "optimizer", opt_param_scheduler=None
    )
    assert megatron_lm.events == ["in files", "save", "in memory"]


@pytest.mark.usefixtures("one_rank", "moving", "installed")
def test_checkpoints_without_an_optimizer_move_no_states(
    megatron_lm: FakeMegatronLm, script: TrainingScript, tmp_path: Path
) -> None:
    """As when Megatron-LM makes experts of a dense model, or only evaluates."""
    parse(megatron_lm, "--optimizer-state-offload", "ssd", "--optimizer-state-dir", str(tmp_path))
    megatron_lm.training.load_checkpoint(megatron_lm.model, None, None)
    megatron_lm.flags.skip_train, megatron_lm.flags.load = True, str(tmp_path)
    set_up(megatron_lm)
    assert megatron_lm.events == ["load", "build", "load"]


ACTIVATIONS = ["--activation-offload", "ssd", "--activation-offload-dir", "."]
STATES = ["--optimizer-state-offload", "host"]
PARAMETERS = ["--parameter-offload", "host"]
UNITS = ["--layer-major-units", "2"]
LOSS = ["--activation-chunked-loss", "auto"]
TILES = ["--activation-tiled-mlp", "auto"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("argv", "flags", "changed", "sentence"),
    [
        # what offload of activations does not fit with
        (
            ACTIVATIONS,
            {"use_megatron_fsdp": True},
            {},
            "use_megatron_fsdp cannot be combined with offload",
        ),
        (ACTIVATIONS, {"use_torch_fsdp2": True}, {}, "use_torch_fsdp2 cannot be combined"),
        (ACTIVATIONS, {"use_legacy_models": True}, {}, "use_legacy_models cannot be combined"),
        (ACTIVATIONS, {"inprocess_restart": True}, {}, "inprocess_restart cannot be combined"),
        (ACTIVATIONS, {"perform_rl_step": True}, {}, "perform_rl_step cannot be combined"),
        (ACTIVATIONS, {"gtp_weight_remat_size": 2}, {}, "gtp_weight_remat_size cannot be combined"),
        (ACTIVATIONS, {}, {"cuda_graph_impl": "local"}, "drop --cuda-graph-impl"),
        (
            ACTIVATIONS,
            {},
            {"distribute_saved_activations": True},
            "drop --distribute-saved-activations",
        ),
        # our own flags
        (["--activation-offload", "ssd"], {}, {}, "needs a place on an SSD"),
        ([*ACTIVATIONS[:-1], "/no/such/place"], {}, {}, "/no/such/place"),
        # what computes in pieces, and flags that look at the whole
        (LOSS, {"logits_save_dir": "logits"}, {}, "it saves the logits; drop --logits-save-dir"),
        (LOSS, {"logits_load_dir": "logits"}, {}, "drop --logits-load-dir"),
        (LOSS, {"save_dgrads_interval": 2}, {}, "what the output layer gives would be missing"),
        (TILES, {"save_activations_interval": 2}, {}, "it would save one tile of each MLP"),
        # optimizers whose states cannot move
        (
            STATES,
            {"async_save": True},
            {},
            "needs a copy of all of them in memory; drop --async-save",
        ),
        (STATES, {"optimizer_cpu_offload": True}, {}, "drop --optimizer-cpu-offload"),
        (STATES, {"optimizer": "muon"}, {}, "optimizer muon cannot be combined with state offload"),
        (STATES, {"log_params_norm": True}, {}, "drop --log-params-norm"),
        (STATES, {"use_torch_fsdp2": True}, {}, "use_torch_fsdp2 cannot be combined"),
        # who looks at parameters that move
        (PARAMETERS, {"log_params_norm": True}, {}, "drop --log-params-norm"),
        (
            PARAMETERS,
            {"check_weight_hash_across_dp_replicas_interval": 100},
            {},
            "look the same on all replicas",
        ),
        # steps in units that cannot be
        (UNITS, {}, {"pipeline_model_parallel_size": 2}, "needs a model on one pipeline stage"),
        (UNITS, {}, {"recompute_granularity": "full"}, "checkpoints hide the layers"),
        (UNITS, {}, {"fp8": "hybrid"}, "fp8 hybrid cannot be combined with --layer-major-units"),
        (
            UNITS,
            {"use_megatron_fsdp": True},
            {},
            "use_megatron_fsdp cannot be combined with offload",
        ),
        ([*UNITS, "--activation-boundary", "host"], {}, {}, "needs --activation-offload ssd"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_built(
    megatron_lm: FakeMegatronLm,
    script: TrainingScript,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    flags: dict[str, Any],
    changed: dict[str, Any],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    vars(megatron_lm.flags).update(flags)
    megatron_lm.settings = settings(**changed)
    parse(megatron_lm, *argv)
    with pytest.raises(ConfigurationError, match=sentence):
        set_up(megatron_lm)
    assert megatron_lm.events == []


@pytest.mark.usefixtures("one_rank")
def test_t5_needs_room_for_its_encoder_its_decoder_and_what_lies_between(
    megatron_lm: FakeMegatronLm, script: TrainingScript, installed: dict[str, Any], tmp_path: Path
) -> None:
    offload = ("--activation-offload", "ssd", "--activation-offload-dir", str(tmp_path))
    parse(megatron_lm, *offload)
    set_up(megatron_lm)
    one_block = installed["reserve_bytes"]
    parse(megatron_lm, *offload)
    megatron_lm.flags.decoder_seq_length = megatron_lm.flags.seq_length
    set_up(megatron_lm)
    assert 2 * one_block < installed["reserve_bytes"] < 3 * one_block


@pytest.mark.usefixtures("one_rank")
def test_flags_that_were_lost_are_no_reason_to_train_without_offload(
    megatron_lm: FakeMegatronLm, script: TrainingScript
) -> None:
    with pytest.raises(ConfigurationError, match="--yaml-cfg"):
        set_up(megatron_lm)


@pytest.mark.usefixtures("one_rank")
def test_a_model_without_transformer_blocks_is_refused(
    megatron_lm: FakeMegatronLm, script: TrainingScript, tmp_path: Path
) -> None:
    parse(megatron_lm, "--activation-offload", "ssd", "--activation-offload-dir", str(tmp_path))
    with pytest.raises(ConfigurationError, match="Linear has no TransformerBlock"):
        set_up(megatron_lm)


@pytest.mark.usefixtures("one_rank")
def test_steps_in_units_need_no_offload(
    megatron_lm: FakeMegatronLm, script: TrainingScript, installed: dict[str, Any]
) -> None:
    parse(megatron_lm, "--layer-major-units", "2", "--layer-major-order", "alternating")
    set_up(megatron_lm)
    assert not installed["config"].enabled and installed["reserve_bytes"] == 0
    assert installed["layer_major"].num_units == 2 and installed["layer_major"].alternates
    plain = (str, int, float, type(None))
    assert all(isinstance(value, plain) for value in vars(megatron_lm.flags).values())


@pytest.mark.usefixtures("one_rank")
def test_a_model_without_layers_has_no_units(
    megatron_lm: FakeMegatronLm, script: TrainingScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found when the model is there, and said by all ranks."""
    said: list[str | None] = []
    monkeypatch.setattr(training_script, "raise_first", said.extend)
    (model,) = megatron_lm.model
    model.config = megatron_lm.settings
    parse(megatron_lm, "--layer-major-units", "auto")
    set_up(megatron_lm)
    assert said[-1] == "layer-major steps: --layer-major-units: the model has no layers that repeat"


@pytest.mark.slow
def test_an_error_of_one_rank_reaches_all(tmp_path: Path) -> None:
    ranks = [
        start_python(
            """
            import sys
            import torch.distributed as dist
            from megatron.offload import ConfigurationError
            from megatron.offload.integration.megatron import training_script, whole_training

            rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

            def action():
                if rank == 1:
                    raise ConfigurationError("rank 1 has no room")

            try:
                training_script._on_all_ranks(action)
            except ConfigurationError as error:
                print(error, training_script._of_local_ranks(10 + rank))
            dist.destroy_process_group()  # at the interpreter's end its threads may abort
            """,
            rank,
            tmp_path / "store",
        )
        for rank in range(2)
    ]
    for process in ranks:
        code, output, errors = finish(process)
        assert code == 0, errors
        # Some versions of torch say there that the ranks have met.
        assert output.splitlines()[-1] == "activation offload: rank 1 has no room [10, 11]"


@pytest.mark.usefixtures("one_rank")
def test_the_disk_is_asked_for_what_all_stages_of_the_machine_need_together(
    megatron_lm: FakeMegatronLm,
    script: TrainingScript,
    installed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of two stages the first holds two micro-batches at once, the second holds one."""
    megatron_lm.settings = settings(pipeline_model_parallel_size=2)
    reserves: list[int] = []
    asked: list[int] = []
    monkeypatch.setattr(
        "megatron.offload.activations.open.check_room", lambda *args: asked.append(args[-1])
    )

    def set_up_stage(stage: int) -> int:
        monkeypatch.setattr(training_script, "_stage", lambda: stage)
        parse(megatron_lm, "--activation-offload", "ssd", "--activation-offload-dir", str(tmp_path))
        set_up(megatron_lm)
        return int(installed["reserve_bytes"])

    reserves += (set_up_stage(0), set_up_stage(1))
    assert asked == reserves  # each is alone
    assert reserves[0] == pytest.approx(2 * reserves[1], rel=1e-3) and reserves[1] > 1000
    monkeypatch.setattr(training_script, "_of_local_ranks", lambda own: reserves)
    asked.clear()
    for stage, reserve in enumerate(reserves):
        assert set_up_stage(stage) == reserve  # what it allocates is its own
        assert installed["num_local_ranks"] == 2
    assert asked[0] == asked[1]
    assert sum(reserves) <= asked[0] <= sum(reserves) + 1


# ------------------------------------------------------------------ steps and their log


@pytest.fixture
def training(
    megatron_lm: FakeMegatronLm,
    script: TrainingScript,
    installed: dict[str, Any],
    one_rank: None,
    tmp_path: Path,
) -> FakeMegatronLm:
    """A script that is ready for its first step."""
    parse(megatron_lm, "--activation-offload", "ssd", "--activation-offload-dir", str(tmp_path))
    set_up(megatron_lm)
    megatron_lm.events.clear()
    return megatron_lm


def test_a_step_is_around_the_schedule_and_not_around_the_optimizer(
    training: FakeMegatronLm,
) -> None:
    assert training.train() == "losses"
    assert training.events == ["begin", "forward and backward", "end", "optimizer", "pause"]


def test_the_log_line_says_what_was_offloaded_and_other_lines_do_not(
    training: FakeMegatronLm,
) -> None:
    training.train(iteration=7)
    training.training.print_rank_last("validation loss")
    line, validation = training.printed
    assert line.startswith(" iteration 7 | offloaded: 3 MiB | rejected: 0 B | stall: 0.750 s |")
    assert " peak activations: " in line  # this is a CPU
    assert validation == "validation loss"


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_counters_go_to_the_scripts_own_writers(training: FakeMegatronLm, kind: str) -> None:
    writer = Scalars()
    setattr(training, kind, writer)
    training.flags.tensorboard_log_interval = 2
    training.train(iteration=1)
    assert writer.values == {}
    training.train(iteration=2)
    assert writer.values["offload/offloaded_bytes"] == (3 << 20, 2)
    assert writer.values["offload/stall_s"] == (0.25, 2)
    assert writer.values["offload/peak_activation_bytes"][0] >= 0
    assert writer.values["offload/peak_device_bytes"][0] > 1 << 20


def test_a_step_that_fails_ends_offloads_step_too(training: FakeMegatronLm) -> None:
    def schedule(**kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        training.training.train_step(None, None, None, None, None, None, schedule)
    assert training.events == ["begin", "end"]


def test_close_ends_offload(training: FakeMegatronLm, script: TrainingScript) -> None:
    assert script.summary() == "the summary"
    script.close()
    assert training.events == ["close"]


@pytest.mark.usefixtures("one_rank")
def test_off_and_skip_train_install_nothing_that_moves(
    megatron_lm: FakeMegatronLm, script: TrainingScript, installed: dict[str, Any]
) -> None:
    megatron_lm.flags.skip_train = True
    parse(megatron_lm)
    set_up(megatron_lm)
    assert installed == {}
    megatron_lm.flags.skip_train = False
    set_up(megatron_lm)
    assert not installed["config"].enabled


def test_a_script_that_goes_another_way_is_told_so(
    megatron_lm: FakeMegatronLm, script: TrainingScript
) -> None:
    assert "never called setup_model_and_optimizer" in script.summary()
    with pytest.raises(ConfigurationError, match="cannot be offloaded by the launcher"):
        megatron_lm.train()


# ------------------------------------------------------------------ metrics.jsonl


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def metrics(
    megatron_lm: FakeMegatronLm,
    script: TrainingScript,
    installed: dict[str, Any],
    one_rank: None,
    tmp_path: Path,
) -> Path:
    """A script that is ready for its first step and writes this file."""
    path = tmp_path / "run" / "metrics.jsonl"
    offload = ("--activation-offload", "ssd", "--activation-offload-dir", str(tmp_path))
    parse(megatron_lm, *offload, "--metrics-file", str(path))
    set_up(megatron_lm)
    assert installed["run_directory"] == path.parent  # where auto's profile goes
    return path


def test_each_step_is_a_line_that_report_reads(
    megatron_lm: FakeMegatronLm, metrics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron_lm.flags.data_parallel_size = 4  # of which one is here
    megatron_lm.train(1, lm=0.1)
    megatron_lm.train(2, lm=float("nan"))
    first, second = lines_of(metrics)
    assert (first["step"], second["step"]) == (1, 2)
    assert first["loss"] == torch.tensor(0.1).item() and math.isnan(second["loss"])
    assert first["grad_norm"] == 2.5 and first["learning_rate"] == 0.125
    # Two micro-batches of two samples of eight tokens, four times.
    assert first["tokens_per_s"] * first["step_time_s"] == pytest.approx(2 * 2 * 8 * 4)
    assert first["offload"] == STATISTICS and "losses" not in first
    assert first["peak_device_bytes"] >= first["peak_activation_bytes"] >= 0
    assert first["peak_activation_bytes_rank0"] == first["peak_activation_bytes"]
    assert first["peak_device_bytes"] > 1 << 20  # a process
    assert cli.main(["report", str(metrics)]) == 0
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[:2] == ["run", "2"]  # its folder, and steps


def test_several_losses_are_added_and_kept(megatron_lm: FakeMegatronLm, metrics: Path) -> None:
    megatron_lm.train(1, lm=2.5, sop=0.5)
    (line,) = lines_of(metrics)
    assert line["loss"] == 3.0 and line["losses"] == {"lm": 2.5, "sop": 0.5}


@pytest.mark.usefixtures("one_rank", "installed")
def test_a_run_without_offload_is_measured_too_and_a_resumed_one_goes_on(
    megatron_lm: FakeMegatronLm, script: TrainingScript, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    megatron_lm.flags.iteration = 2
    parse(megatron_lm, "--metrics-file", str(path))
    set_up(megatron_lm)
    megatron_lm.train(3, lm=1.0)
    script.close()
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3]
    assert lines_of(path)[-1]["loss"] == 1.0


@pytest.mark.usefixtures("one_rank", "installed")
def test_a_metrics_file_without_a_place_is_refused_before_a_model_is_built(
    megatron_lm: FakeMegatronLm, script: TrainingScript, tmp_path: Path
) -> None:
    parse(megatron_lm, "--metrics-file", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"--metrics-file has no place: .* is a directory"):
        set_up(megatron_lm)
    assert megatron_lm.events == []


@pytest.mark.usefixtures("one_rank", "installed")
def test_a_metrics_file_that_cannot_be_opened_is_a_sentence_of_all_ranks(
    megatron_lm: FakeMegatronLm,
    script: TrainingScript,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def open_it(self: MetricsFile, path: Path, first_step: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsFile, "__init__", open_it)
    parse(megatron_lm, "--metrics-file", str(tmp_path / "metrics.jsonl"))
    with pytest.raises(ConfigurationError, match=r"has no place: .* No space left on device; give"):
        set_up(megatron_lm)


def test_a_model_without_a_sequence_is_measured_all_the_same(
    megatron_lm: FakeMegatronLm, metrics: Path
) -> None:
    megatron_lm.flags.seq_length = None
    megatron_lm.train(1, lm=1.0)
    assert lines_of(metrics)[0]["tokens_per_s"] == 0.0


def test_a_disk_that_is_full_ends_the_file_and_not_the_training(
    megatron_lm: FakeMegatronLm, metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron_lm.train(1, lm=1.0)

    def write(self: MetricsFile, record: StepRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsFile, "write", write)
    assert megatron_lm.train(2, lm=1.0) == megatron_lm.train(3, lm=1.0) == "losses"
    assert len(lines_of(metrics)) == 1


@pytest.mark.usefixtures("one_rank", "installed")
def test_a_step_waits_for_its_turn_and_the_end_of_input_ends_the_training(
    megatron_lm: FakeMegatronLm, script: TrainingScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse(megatron_lm, "--wait-for-input")
    set_up(megatron_lm)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert megatron_lm.train(1) == "losses"
    with pytest.raises(SystemExit) as left:
        megatron_lm.train(2)
    assert left.value.code == 0 and megatron_lm.events.count("optimizer") == 1


# ------------------------------------------------------------------ patch points


def test_close_restores_every_function(megatron_lm: FakeMegatronLm) -> None:
    before = {name: dict(vars(getattr(megatron_lm, name))) for name in ("arguments", "training")}
    script = TrainingScript()
    script.connect()
    for name, functions in before.items():
        assert vars(getattr(megatron_lm, name)) != functions
    script.close()
    for name, functions in before.items():
        assert vars(getattr(megatron_lm, name)) == functions


@pytest.mark.parametrize("patch_point", PATCH_POINTS, ids=lambda patch_point: patch_point.name)
def test_a_function_that_is_missing_is_refused_by_name(
    megatron_lm: FakeMegatronLm, monkeypatch: pytest.MonkeyPatch, patch_point: Any
) -> None:
    module = getattr(megatron_lm, patch_point.module.rpartition(".")[2])
    monkeypatch.delattr(module, patch_point.name)
    before = {name: dict(vars(getattr(megatron_lm, name))) for name in ("arguments", "training")}
    with pytest.raises(
        ConfigurationError, match=f"{patch_point.module} has no function {patch_point.name};"
    ):
        TrainingScript().connect()
    for name, functions in before.items():
        assert vars(getattr(megatron_lm, name)) == functions


@pytest.mark.parametrize(
    "patch_point",
    [patch_point for patch_point in PATCH_POINTS if patch_point.parameters],
    ids=lambda patch_point: patch_point.name,
)
def test_a_function_with_another_signature_is_refused_by_parameter(
    megatron_lm: FakeMegatronLm, monkeypatch: pytest.MonkeyPatch, patch_point: Any
) -> None:
    module = getattr(megatron_lm, patch_point.module.rpartition(".")[2])
    monkeypatch.setattr(module, patch_point.name, lambda one, *others: None)
    with pytest.raises(
        ConfigurationError, match=f"{patch_point.name} has no parameter {patch_point.parameters[0]}"
    ):
        TrainingScript().connect()


def test_further_parameters_are_no_reason_to_refuse(
    megatron_lm: FakeMegatronLm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training_log(loss_dict: Any, iteration: int, is_first_iteration: bool, new: int) -> None:
        pass

    monkeypatch.setattr(megatron_lm.training, "training_log", training_log)
    script = TrainingScript()
    script.connect()
    script.close()
    assert megatron_lm.training.training_log is training_log
