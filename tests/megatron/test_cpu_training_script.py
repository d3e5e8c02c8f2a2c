# SPDX-License-Identifier: Apache-2.0
"""What a training script of Megatron-LM needs on a CPU beyond megatron-core's CPU runtime."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.offload import ConfigurationError
from megatron.offload.integration.megatron import cpu_runtime, cpu_training_script

TRAINING = "megatron.training.training"
ENVIRONMENT = ("TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture(autouse=True)
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends with the runtime off."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is put back as it was, also where it was not
        monkeypatch.delenv(name)
    random_log = logging.getLogger("megatron.core.tensor_parallel.random")
    level = random_log.level
    cpu_runtime.deactivate()
    yield
    cpu_runtime.deactivate()
    random_log.setLevel(level)


def cyclic_iter(batches: Iterable[int]) -> Iterator[int]:
    while True:
        yield from batches


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Megatron-LM's `training.py` with what the runtime asks of it."""
    module = ModuleType(TRAINING)
    vars(module).update(
        initialize_megatron=lambda args_defaults=None, allow_no_cuda=False: allow_no_cuda,
        build_train_valid_test_data_iterators=lambda provider: provider(),
        cyclic_iter=cyclic_iter,
    )
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, TRAINING, module)
    return module


def test_megatron_lm_starts_without_cuda(training: ModuleType) -> None:
    before = dict(vars(training))
    assert cpu_training_script.activate()
    assert training.initialize_megatron(args_defaults={}) is True
    assert [os.environ[name] for name in ENVIRONMENT] == ["1", "1"]
    assert torch.cuda.get_device_properties("cuda:0").major == 8
    assert not torch.cuda.is_available()
    cpu_runtime.deactivate()
    assert dict(vars(training)) == before


def test_loading_data_leaves_dropouts_generator_where_the_checkpoint_put_it(
    training: ModuleType,
) -> None:
    def draw() -> float:
        return float(torch.rand(()))

    cpu_training_script.activate()
    torch.manual_seed(3)
    expected = draw()
    torch.manual_seed(3)
    assert training.build_train_valid_test_data_iterators(draw) == expected
    assert draw() == expected


def test_an_epoch_that_begins_leaves_dropouts_generator(training: ModuleType) -> None:
    """A layer-major step knows where each micro-batch begins by what the step before has drawn."""
    cpu_training_script.activate()
    batches = training.cyclic_iter(torch.utils.data.DataLoader([1, 2], batch_size=None))
    state = torch.get_rng_state()
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert torch.equal(torch.get_rng_state(), state)


def test_berts_script_finds_layers_without_transformer_engine(training: ModuleType) -> None:
    specs = importlib.import_module("megatron.core.models.bert.bert_layer_specs")
    if specs.HAVE_TE:
        pytest.skip("Transformer Engine is there")
    cpu_training_script.activate()
    assert specs.bert_layer_with_transformer_engine_spec is specs.bert_layer_local_spec
    cpu_runtime.deactivate()
    with pytest.raises(ImportError, match="Transformer Engine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        specs.bert_layer_with_transformer_engine_spec  # noqa: B018


def test_where_cuda_is_nothing_is_touched(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(training))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu_training_script.activate()
    assert dict(vars(training)) == before and not cpu_runtime.is_active()


def test_a_training_module_of_another_kind_is_refused(training: ModuleType) -> None:
    training.initialize_megatron = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="initialize_megatron has no parameter allow_no"):
        cpu_training_script.activate()


# Megatron-LM's flags for a machine without CUDA, and what it takes where they are not given.
CPU_FLAGS = (
    "--transformer-impl local --distributed-backend gloo --use-cpu-initialization"
    " --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    " --no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion"
)


def parser(*, has_rope_fusion: bool = True) -> argparse.ArgumentParser:
    """As far as these flags go, that of Megatron-LM."""
    result = argparse.ArgumentParser()
    result.add_argument("--transformer-impl", default="transformer_engine")
    result.add_argument("--distributed-backend", default="nccl")
    result.add_argument("--use-cpu-initialization", action="store_true")
    result.add_argument("--no-persist-layer-norm", action="store_true")
    fusions = ["gradient-accumulation", "masked-softmax", "bias-gelu", "bias-swiglu"]
    for name in (*fusions, "bias-dropout"):
        destination = f"{name.replace('-', '_')}_fusion"
        result.add_argument(f"--no-{name}-fusion", action="store_false", dest=destination)
    if has_rope_fusion:
        result.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    return result


def test_what_needs_cuda_is_off_by_default_and_flags_still_win() -> None:
    expected = parser().parse_args(CPU_FLAGS.split())
    flags = parser()
    assert flags.parse_args([]) != expected
    cpu_training_script.set_defaults(flags)
    assert flags.parse_args([]) == expected
    expected.distributed_backend = "mpi"
    assert flags.parse_args(["--distributed-backend", "mpi"]) == expected


def test_a_parser_without_such_a_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no --no-rope-fusion, which a CPU needs"):
        cpu_training_script.set_defaults(parser(has_rope_fusion=False))


def test_a_writer_of_checkpoints_that_needs_cuda_is_refused() -> None:
    """Its process would end with a ZeroDivisionError, by `torch.cuda.device_count()`."""
    cpu_training_script.check_flags(argparse.Namespace(async_save=True))
    flags = argparse.Namespace(async_save=True, use_persistent_ckpt_worker=True)
    with pytest.raises(ConfigurationError, match=r"this machine has none.*drop --async-save"):
        cpu_training_script.check_flags(flags)


def test_the_log_says_which_flags_are_set(
    training: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        cpu_training_script.activate()
    assert f"Megatron-LM gets {CPU_FLAGS} by default" in caplog.text


def test_pipeline_stages_keep_what_gloo_may_still_read() -> None:
    chunk = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    chunk[1].config = SimpleNamespace(deallocate_pipeline_outputs=True)
    cpu_training_script.keep_sent_tensors([chunk])
    assert chunk[1].config.deallocate_pipeline_outputs is False
