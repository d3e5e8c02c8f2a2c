# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload estimate`, from flags to what is printed and written: `run`.

The CLI calls it. Nothing is trained.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator

from megatron.offload.activations.placement.atomic_file import write_atomically
from megatron.offload.commands.estimate.hardware import Memory
from megatron.offload.commands.estimate.model import Adapters, Architecture
from megatron.offload.commands.estimate.step import Pass, StepBytes, step_bytes
from megatron.offload.commands.estimate.text import Estimate, as_json, as_text
from megatron.offload.commands.estimate.ways import WAYS, Need, Training, need_of
from megatron.offload.errors import ConfigurationError

_ALL_LINEAR = "all-linear"


def run(args: argparse.Namespace) -> int:
    """Estimates, prints the tables and writes the file; the exit code.

    Args:
        args: checked, see `arguments`.

    Raises:
        ConfigurationError: the model or the hardware is not known, or a step of it cannot run.
        OSError: a file cannot be written.
    """
    memory = None if args.hardware is None else Memory.of(args.hardware)
    with _quiet():
        found = estimate(args, memory)
    print(as_text(found))
    if args.json is not None:
        write_atomically(args.json, as_json(found))
    return (
        0 if memory is None or any(memory.fits(one.device) for one in found.needs.values()) else 1
    )


def estimate(args: argparse.Namespace, memory: Memory | None) -> Estimate:
    """What each way takes. Raises ConfigurationError."""
    adapters = None
    if args.lora is not None:
        adapters = Adapters(args.lora, _targets(args.lora_targets))
    architecture = _architecture(args, adapters)
    on_cpu = memory is not None and memory.on_cpu
    training = Training(args.optimizer, on_cpu, args.to, args.gpus, args.micro_batches)
    steps: dict[Pass, StepBytes] = {}
    needs: dict[str, Need] = {}
    left_out: dict[str, str] = {}
    for name, way in WAYS.items():
        if training.gpus > 1 and way.parameters_move:
            left_out[name] = "FSDP2 divides parameters, and those that it divides stay with it"
            continue
        try:
            if way.how not in steps:
                steps[way.how] = step_bytes(
                    architecture,
                    args.batch,
                    args.sequence,
                    way.how,
                    on_cpu=on_cpu,
                    accumulates=args.micro_batches > 1,
                )
        except ConfigurationError as error:
            if not way.how.chunks_loss:
                raise
            left_out[name] = str(error)  # a loss that is no mean over tokens of a vocabulary
            continue
        except Exception as error:  # of code that others have written, for values
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigurationError(
                f"a step of {architecture.name} cannot run without values ({reason[:160]}); "
                "measure it with your script: megatron-offload longest --script"
            ) from None
        needs[name] = need_of(way, steps[way.how], training)
    return Estimate(
        name=architecture.name,
        num_layers=architecture.num_layers,
        asked=vars(args) | {"json": None},
        training=training,
        memory=memory,
        steps=steps,
        needs=needs,
        left_out=left_out,
    )


def _architecture(args: argparse.Namespace, adapters: Adapters | None) -> Architecture:
    try:
        return Architecture(args.model, args.dtype, adapters)
    except (ConfigurationError, OSError):
        raise
    except Exception as error:  # a model's constructor checks its configuration
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"transformers makes no model of this configuration ({reason[:160]}); correct it"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of configurations and of its own names."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _targets(text: str | None) -> tuple[str, ...] | str | None:
    if text is None or text == _ALL_LINEAR:
        return text
    return tuple(one.strip() for one in text.split(",") if one.strip())
