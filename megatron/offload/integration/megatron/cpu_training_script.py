# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own training scripts on a machine without CUDA: `activate`.

They ask for more than megatron-core does: what `cpu_runtime.py` redirects is not enough. The
launcher calls `activate` instead of importing `megatron.training`, and `TrainingScript` the rest.
Features that only CUDA has are off by default then; flags on the command line still win.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron.offload.device.cuda import has_cuda
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration import gloo
from megatron.offload.integration.megatron import cpu_runtime
from megatron.offload.integration.megatron.cpu_runtime import Redirection
from megatron.offload.integration.megatron.patch_point import PatchPoint

_log = logging.getLogger(__name__)

# What Megatron-LM reads as "needs CUDA", and its value without: destination, value, flag.
_DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("transformer_impl", "local", "--transformer-impl local"),
    ("distributed_backend", "gloo", "--distributed-backend gloo"),
    ("use_cpu_initialization", True, "--use-cpu-initialization"),
    ("no_persist_layer_norm", True, "--no-persist-layer-norm"),
    ("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion"),
    ("masked_softmax_fusion", False, "--no-masked-softmax-fusion"),
    ("apply_rope_fusion", False, "--no-rope-fusion"),
    ("bias_gelu_fusion", False, "--no-bias-gelu-fusion"),
    ("bias_swiglu_fusion", False, "--no-bias-swiglu-fusion"),
    ("bias_dropout_fusion", False, "--no-bias-dropout-fusion"),
)

_TRAINING = "megatron.training.training"

_ENVIRONMENT = {
    # torch.compile would look for a compiler of the GPU that the runtime stands in for.
    "TORCHDYNAMO_DISABLE": "1",
    # Asserted for tensor parallelism; without CUDA there is nothing to connect.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def activate() -> bool:
    """Turns the CPU runtime on, with what the training scripts need beyond it.

    Returns:
        Whether it is on; False where CUDA is available, and then nothing was touched.
    """
    if has_cuda():
        return False
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    cpu_runtime.activate()
    # It warns whenever the CPU's generator moves where only the GPU's should: here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    cpu_runtime.redirect(_table())
    _log.info(
        "CPU runtime: Megatron-LM gets %s by default", " ".join(flag for _, _, flag in _DEFAULTS)
    )
    return True


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Turns what needs CUDA off by default.

    Raises:
        ConfigurationError: the parser lacks one of them.
    """
    known = {action.dest for action in parser._actions}
    missing = [flag for name, _, flag in _DEFAULTS if name not in known]
    if missing:
        raise ConfigurationError(
            f"Megatron-LM has no {', '.join(missing)}, which a CPU needs; use a release that "
            "README.md names"
        )
    parser.set_defaults(**{name: value for name, value, _ in _DEFAULTS})


def check_flags(flags: argparse.Namespace) -> None:
    """Raises ConfigurationError for Megatron-LM's flags that cannot work on the CPU runtime."""
    if getattr(flags, "async_save", False) and getattr(flags, "use_persistent_ckpt_worker", False):
        raise ConfigurationError(
            "--async-save --use-persistent-ckpt-worker writes checkpoints in a process that needs "
            "CUDA, and this machine has none: that process would fail, and training wait for it "
            "for ever; drop --async-save"
        )


def end_groups() -> None:
    """Ends the process groups where the CPU runtime is on; the scripts leave them to the exit.

    Gloo's threads sometimes abort a process that exits with them: what still holds a group keeps
    them alive, so they are waited for too. Call it where no rank has a collective under way.
    """
    if cpu_runtime.is_active() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gloo.wait_until_idle()


def keep_sent_tensors(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Makes pipeline stages keep a tensor that they have sent.

    Megatron-LM frees its storage after the send has begun, which a CUDA stream puts in order; gloo
    may still be reading it.
    """
    for chunk in model_chunks:
        for module in chunk.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "deallocate_pipeline_outputs"):
                config.deallocate_pipeline_outputs = False


def _leaving_the_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=()):
            return function(*args, **kwargs)

    return call


class _Epochs:
    """Batches for which a DataLoader draws no number of dropout's when an epoch begins."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=()):
            return iter(self._batches)


def _table() -> Iterable[Redirection]:
    """What Megatron-LM reaches beyond megatron-core."""
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1
    )
    yield Redirection(
        "torch.cuda",
        "get_device_properties",
        lambda *args, **kwargs: properties,
        "flags are checked against the GPU's generation",
    )
    initialize = PatchPoint(_TRAINING, "initialize_megatron", ("allow_no_cuda",))
    yield Redirection(
        initialize.module,
        initialize.name,
        functools.partial(initialize.find(), allow_no_cuda=True),
        "asserts that CUDA is available",
    )
    build_data = PatchPoint(_TRAINING, "build_train_valid_test_data_iterators", ())
    yield Redirection(
        build_data.module,
        build_data.name,
        _leaving_the_generator(build_data.find()),
        "draws from the CPU's generator, here also dropout's, after a checkpoint has set it",
    )
    cycle = PatchPoint(_TRAINING, "cyclic_iter", ())
    epochs = cycle.find()
    yield Redirection(
        cycle.module,
        cycle.name,
        lambda batches: epochs(_Epochs(batches)),
        "with --dataloader-type cyclic a step in which an epoch begins would draw more numbers",
    )
    bert = "megatron.core.models.bert.bert_layer_specs"
    specs = importlib.import_module(bert)
    if not specs.HAVE_TE:
        yield Redirection(
            bert,
            "bert_layer_with_transformer_engine_spec",
            specs.bert_layer_local_spec,
            "pretrain_bert.py imports it by name, and takes it whatever --transformer-impl says",
        )
    fused_kernels = "megatron.legacy.fused_kernels"
    if fused_kernels in sys.modules:  # imported by those versions that load them
        yield Redirection(
            fused_kernels,
            "load",
            lambda args: None,
            "asks nvcc for its version, to compile nothing",
        )
