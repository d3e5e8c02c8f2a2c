# SPDX-License-Identifier: Apache-2.0
"""Runs an unmodified training script of Megatron-LM with offload of activations and model states.

    torchrun --nproc-per-node 8 -m megatron.offload.launch /path/to/Megatron-LM/pretrain_gpt.py \
        ITS FLAGS --activation-offload ssd --activation-offload-dir /mnt/ssd0/offload

Everything that knows Megatron-LM is in `integration/megatron/training_script.py`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron.offload.errors import PREFIX, ConfigurationError
from megatron.offload.integration.megatron import cpu_training_script
from megatron.offload.integration.megatron.arguments import add_offload_arguments
from megatron.offload.integration.megatron.dataset_module import set_python_of_datasets
from megatron.offload.integration.megatron.measured_steps import add_measuring_arguments
from megatron.offload.integration.megatron.training_script import TrainingScript
from megatron.offload.integration.torchrun_report import record_sentence, recorded_errors

_NAME = "megatron.offload.launch"
_USAGE = (
    f"python -m {_NAME} SCRIPT [FLAGS OF THE SCRIPT]\n"
    "           [--activation-offload ...] [--optimizer-state-offload ...]"
)
_EXAMPLES = """\
Runs a training script of a Megatron-LM checkout (pretrain_gpt.py, for example) as it is. The script
takes the flags below beside its own; losses and weights stay the same, bit for bit. Its log line,
TensorBoard and wandb also show what was offloaded, and the run ends with a summary.

One machine:

  torchrun --nproc-per-node 8 -m megatron.offload.launch /path/to/Megatron-LM/pretrain_gpt.py \\
      --tensor-model-parallel-size 8 ... \\
      --activation-offload ssd --activation-offload-dir /mnt/ssd0/offload,/mnt/ssd1/offload

Slurm, one task on each node, which starts the ranks:

  srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 \\
      --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $HEAD_NODE:29500 \\
      -m megatron.offload.launch /path/to/Megatron-LM/pretrain_gpt.py ...

Can these disks work?  megatron-offload doctor --activation-offload ssd --activation-offload-dir DIR
The script's own flags: python -m megatron.offload.launch SCRIPT --help
Without a CUDA device it runs on the CPU, over gloo; the log says which defaults that changes."""

# The other ranks wait this long before they leave: a launcher that sees one rank fail kills the
# rest, and rank 0 must have said why by then.
_EXIT_DELAY_S = 2.0

_HELP = frozenset(("-h", "--help"))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the script. What the user can put right ends with one sentence and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        if _is_rank_0():
            print(f"usage: {_USAGE}", file=sys.stderr)
        _fail(
            "there is no script to run; give one of a Megatron-LM checkout, for example "
            "Megatron-LM/pretrain_gpt.py, and its flags; --help shows ours"
        )
    if argv[0] in _HELP:
        _parser().print_help()
        sys.exit(0)
    _show_our_log()
    try:
        with recorded_errors():
            run(Path(argv[0]), argv[1:])
    except ConfigurationError as error:
        _fail(str(error).removeprefix(PREFIX))


def run(path: Path, flags: Sequence[str]) -> None:
    """Runs one training script in this process.

    Args:
        path: the script.
        flags: its flags, and ours.

    Raises:
        ConfigurationError: the script, its Megatron-LM or the flags cannot work.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"{path} is not a file; give the path of a training script, for example "
            "Megatron-LM/pretrain_gpt.py"
        )
    sys.argv = [str(path), *flags]
    sys.path.insert(0, str(path.resolve().parent))  # as `python SCRIPT` does
    script = TrainingScript()
    try:
        _import_megatron_lm(path)
        script.connect()
        if _is_rank_0():
            _check_datasets()
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as leaving:
        if not leaving.code and _HELP.isdisjoint(flags):
            _finish(script)
        raise
    except ConfigurationError:  # raised on all ranks
        cpu_training_script.end_groups()
        raise
    except AssertionError as error:
        refused = _refused_flags(error)
        if refused is None:
            raise
        raise ConfigurationError(refused) from error
    else:
        _finish(script)
    finally:
        script.close()


def _refused_flags(error: AssertionError) -> str | None:
    """What Megatron-LM does not like about its flags, which it asserts; None: it is no such error.

    All ranks read the flags before they meet.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    if Path(place.filename).parts[-3:] != ("megatron", "training", "arguments.py"):
        return None
    return (
        f"Megatron-LM refuses the flags: {str(error) or place.line}; it says so in line "
        f"{place.lineno} of {place.filename}"
    )


def _finish(script: TrainingScript) -> None:
    _print_once(script.summary())
    cpu_training_script.end_groups()


def _import_megatron_lm(path: Path) -> None:
    try:
        if not cpu_training_script.activate():
            importlib.import_module("megatron.training.training")
    except ImportError as error:
        if error.name in ("megatron.training", "megatron.core"):
            raise ConfigurationError(
                f"there is no {error.name} beside {path} or on PYTHONPATH; give a script of a "
                "Megatron-LM checkout"
            ) from error
        raise ConfigurationError(
            f"Megatron-LM could not be imported: {error}; install what it needs"
        ) from error


def _check_datasets() -> None:
    """Before rank 0 compiles their module; another machine's first rank does not."""
    core = importlib.util.find_spec("megatron.core")
    for folder in core.submodule_search_locations or () if core is not None else ():
        set_python_of_datasets(Path(folder) / "datasets")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_NAME}",
        usage=_USAGE,
        description=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return add_offload_arguments(add_measuring_arguments(parser))


def _is_rank_0() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _show_our_log() -> None:
    """Our log lines on rank 0, warnings on the others, whatever level Megatron-LM sets for its."""
    ours = logging.getLogger("megatron.offload")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO if _is_rank_0() else logging.WARNING)
    ours.propagate = False


def _print_once(text: str) -> None:
    if text and _is_rank_0():
        print(text, flush=True)


def _fail(message: str) -> NoReturn:
    sentence = f"{_NAME}: error: {' '.join(message.split())}"
    record_sentence(sentence, leaves_in_s=0.0 if _is_rank_0() else _EXIT_DELAY_S)
    if _is_rank_0():
        print(sentence, file=sys.stderr, flush=True)
    else:
        time.sleep(_EXIT_DELAY_S)
    sys.exit(2)


if __name__ == "__main__":
    main()
