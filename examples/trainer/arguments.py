# SPDX-License-Identifier: Apache-2.0
"""The command line: flags named as Megatron-LM names them, and every check that needs no model.

`parse_arguments` is called once, before megatron-core or torch.distributed do anything. It never
reads data or builds anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.offload.activations.placement.atomic_file import check_place

from .errors import Parser, UserError, program

SUPPORTED_MEGATRON_CORE = frozenset({"0.16.1"})


def check_megatron_core_version() -> str:
    """The version of the megatron-core that would be imported, without importing it.

    Newer versions fail inside their own import on machines without a GPU, so the version is read
    from the package's file.

    Raises:
        UserError: It is absent, or not one that is supported.
    """
    supported = ", ".join(sorted(SUPPORTED_MEGATRON_CORE))
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    locations = list(spec.submodule_search_locations or []) if spec else []
    for location in locations:
        information = Path(location) / "package_info.py"
        if information.is_file():
            version = str(runpy.run_path(str(information))["__version__"])
            if version not in SUPPORTED_MEGATRON_CORE:
                raise UserError(
                    f"megatron-core {version} is not supported; expected {supported}; "
                    f"install megatron-core=={supported}"
                )
            return version
    raise UserError(f"megatron-core is not installed; install megatron-core=={supported}")


def _has_dali() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # the namespace above it
        return False


# ------------------------------------------------------------------ value types


def _bounded(kind: type, low: float, high: float, meaning: str) -> Callable[[str], float]:
    """A value type: a number with low <= number < high."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < high:
            raise argparse.ArgumentTypeError(f"expected {meaning}, got {text!r}")
        return value

    return convert


positive = _bounded(int, 1, float("inf"), "a positive whole number")
_count = _bounded(int, 0, float("inf"), "a whole number that is not negative")
_probability = _bounded(float, 0.0, 1.0, "a probability in [0, 1)")
fraction = _bounded(float, 0.0, 1.0 + 1e-12, "a fraction in [0, 1]")
real = _bounded(float, 0.0, float("inf"), "a number that is not negative")


def _split(text: str) -> str:
    parts = text.split(",")
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or weights[0] == 0:
        raise argparse.ArgumentTypeError(
            f"expected up to three weights such as 969,30,1 with some training data, got {text!r}"
        )
    return ",".join(parts + ["0"] * (3 - len(parts)))


# ------------------------------------------------------------------ flags

# megatron-core's names.
_RECOMPUTE_MODULES = (
    "core_attn",
    "layernorm",
    "mlp",
    "moe",
    "shared_experts",
    "moe_act",
    "mla_up_proj",
)


def _add_network_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network size")
    group.add_argument("--num-layers", type=positive, default=4)
    group.add_argument("--hidden-size", type=positive, default=256)
    group.add_argument("--ffn-hidden-size", type=positive, help="default: 4 x hidden size")
    group.add_argument("--num-attention-heads", type=positive, default=8)
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-query-groups", type=positive, default=1)
    group.add_argument("--seq-length", type=positive, default=256)
    group.add_argument("--max-position-embeddings", type=positive, help="default: --seq-length")
    group.add_argument(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "none"),
        default="learned_absolute",
    )
    group.add_argument("--rotary-percent", type=fraction, default=1.0)
    group.add_argument("--rotary-base", type=positive, default=10000)
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--norm-epsilon", type=real, default=1e-5)
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--disable-bias-linear", action="store_true")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--make-vocab-size-divisible-by", type=positive, default=128)
    group.add_argument("--attention-dropout", type=_probability, default=0.1)
    group.add_argument("--hidden-dropout", type=_probability, default=0.1)
    group.add_argument("--init-method-std", type=real, default=0.02)


def _add_training_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=positive, default=2)
    group.add_argument(
        "--global-batch-size", type=positive, help="default: micro-batch x data-parallel size"
    )
    group.add_argument("--train-iters", type=positive, default=100)
    group.add_argument("--exit-interval", type=positive, help="leave after a multiple of this")
    group.add_argument("--lr", type=real, default=3e-4)
    group.add_argument("--min-lr", type=real, default=0.0)
    group.add_argument(
        "--lr-decay-style",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
        default="constant",
        help="default: constant, so that a run can be prolonged without changing its past",
    )
    group.add_argument("--lr-warmup-iters", type=_count, default=0)
    group.add_argument("--lr-decay-iters", type=positive, help="default: --train-iters")
    group.add_argument("--weight-decay", type=real, default=0.01)
    group.add_argument("--clip-grad", type=real, default=1.0)
    group.add_argument("--adam-beta1", type=_probability, default=0.9)
    group.add_argument("--adam-beta2", type=_probability, default=0.999)
    group.add_argument("--adam-eps", type=real, default=1e-8)
    group.add_argument("--seed", type=_count, default=1234)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--accumulate-allreduce-grads-in-fp32", action="store_true")
    group.add_argument("--recompute-granularity", choices=("full", "selective"))
    group.add_argument("--recompute-method", choices=("uniform", "block"))
    group.add_argument("--recompute-num-layers", type=positive)
    group.add_argument("--recompute-modules", nargs="+", choices=_RECOMPUTE_MODULES, default=None)
    group.add_argument(
        "--cpu-threads", type=positive, help="torch threads per process; default: cores / ranks"
    )


def _add_parallel_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    group.add_argument("--tensor-model-parallel-size", type=positive, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=positive, default=1)
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=positive)
    group.add_argument("--context-parallel-size", type=positive, default=1)
    group.add_argument("--expert-model-parallel-size", type=positive, default=1)
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument("--overlap-param-gather", action="store_true")
    group.add_argument(
        "--ddp-bucket-size",
        type=positive,
        help="parameters whose gradients are reduced together with --overlap-grad-reduce; "
        "default: 40 M, or 1 M a data-parallel rank",
    )


def _add_data_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path", nargs="+", help="prefix of .bin/.idx files, or: weight prefix weight prefix"
    )
    group.add_argument("--mock-data", action="store_true")
    group.add_argument("--split", type=_split, default="969,30,1")
    group.add_argument("--data-cache-path", help="where core keeps its sample indices")
    group.add_argument(
        "--dataloader-type",
        choices=("default", "dali"),
        default="default",
        help="dali: through an NVIDIA DALI pipeline, which gives the same batches",
    )
    group.add_argument(
        "--tokenizer-type",
        choices=("HuggingFaceTokenizer", "NullTokenizer"),
        help="default: HuggingFaceTokenizer with --tokenizer-model, else NullTokenizer",
    )
    group.add_argument("--tokenizer-model", help="a Hugging Face tokenizer.json")
    group.add_argument("--vocab-size", type=positive, help="for NullTokenizer; default: 4096")


def _add_report_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints, validation and reports")
    group.add_argument("--save", type=Path, help="directory for checkpoints")
    group.add_argument("--load", type=Path, help="directory to go on from")
    group.add_argument("--save-interval", type=positive, help="default: at the end only")
    group.add_argument("--eval-interval", type=positive, default=1000)
    group.add_argument("--eval-iters", type=_count, default=10)
    group.add_argument("--log-interval", type=positive, default=10)
    group.add_argument("--tensorboard-dir", type=Path)
    group.add_argument(
        "--metrics-file", type=Path, help="one JSON object per step; default: in --save"
    )
    group.add_argument(
        "--wait-for-input",
        action="store_true",
        help="before each step wait for a line on standard input, and leave at its end: for "
        "trainings that take turns. One process only",
    )
    group.add_argument(
        "--validate-only", action="store_true", help="check everything, train nothing, exit 0"
    )


# ------------------------------------------------------------------ checks


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _divides(whole_name: str, whole: int, part_name: str, part: int) -> None:
    _require(
        whole % part == 0,
        f"{whole_name} ({whole}) must be divisible by {part_name} ({part}); change one of them",
    )


def _set_layout(args: argparse.Namespace) -> None:
    """Derives data-parallel size, micro-batches, virtual stages; checks that sizes divide."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    _require(
        args.context_parallel_size == 1,
        "--context-parallel-size needs the attention of Transformer Engine, which this trainer "
        "does not split over ranks; use --sequence-parallel, or Megatron-LM's own script with "
        "megatron.offload.launch",
    )
    _require(
        args.world_size % (tp * pp) == 0,
        f"world size ({args.world_size}) must be divisible by tensor ({tp}) x pipeline ({pp}) "
        "parallel size; start as many processes or change the sizes",
    )
    args.data_parallel_size = args.world_size // (tp * pp)
    _divides("--num-layers", args.num_layers, "--pipeline-model-parallel-size", pp)
    args.virtual_pipeline_model_parallel_size = None
    per_virtual_stage = args.num_layers_per_virtual_pipeline_stage
    if per_virtual_stage is not None:
        _require(
            pp > 1,
            "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size above 1",
        )
        per_stage = args.num_layers // pp
        name = "--num-layers-per-virtual-pipeline-stage"
        _divides("layers per pipeline stage", per_stage, name, per_virtual_stage)
        if per_stage > per_virtual_stage:
            args.virtual_pipeline_model_parallel_size = per_stage // per_virtual_stage

    _divides("--hidden-size", args.hidden_size, "--num-attention-heads", args.num_attention_heads)
    tp_name = "--tensor-model-parallel-size"
    _divides("--num-attention-heads", args.num_attention_heads, tp_name, tp)
    _divides("--ffn-hidden-size", args.ffn_hidden_size, tp_name, tp)
    if args.group_query_attention:
        groups = args.num_query_groups
        _divides("--num-attention-heads", args.num_attention_heads, "--num-query-groups", groups)
        _divides("--num-query-groups", groups, tp_name, tp)
    if args.sequence_parallel:
        _require(tp > 1, "--sequence-parallel needs --tensor-model-parallel-size above 1")
        _divides("--seq-length", args.seq_length, tp_name, tp)

    samples = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or samples
    _divides(
        "--global-batch-size",
        args.global_batch_size,
        "--micro-batch-size x data-parallel size",
        samples,
    )
    args.num_microbatches = args.global_batch_size // samples
    if args.virtual_pipeline_model_parallel_size:
        name = "--pipeline-model-parallel-size with virtual stages"
        _divides("micro-batches per step", args.num_microbatches, name, pp)


def _check_combinations(args: argparse.Namespace) -> None:
    """Checks the flags that depend on one another, apart from sizes."""
    _require(
        args.seq_length <= args.max_position_embeddings,
        f"--seq-length ({args.seq_length}) must not exceed --max-position-embeddings "
        f"({args.max_position_embeddings})",
    )
    _require(args.min_lr <= args.lr, f"--min-lr ({args.min_lr}) must not exceed --lr ({args.lr})")
    _require(
        args.lr_warmup_iters < args.lr_decay_iters,
        f"--lr-warmup-iters ({args.lr_warmup_iters}) must be below the iterations of the "
        f"schedule ({args.lr_decay_iters})",
    )
    full = args.recompute_granularity == "full"
    _require(
        not full or (args.recompute_method is not None and args.recompute_num_layers is not None),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
    )
    _require(
        full or (args.recompute_method is None and args.recompute_num_layers is None),
        "--recompute-method and --recompute-num-layers need --recompute-granularity full",
    )
    _require(
        args.recompute_modules is None or args.recompute_granularity == "selective",
        "--recompute-modules needs --recompute-granularity selective",
    )
    for name in ("moe_act", "mla_up_proj"):
        _require(
            name not in (args.recompute_modules or ()),
            f"--recompute-modules {name} needs layers that this trainer does not build; leave it "
            "out, or use Megatron-LM's own script with megatron.offload.launch",
        )
    _require(
        "mlp" not in (args.recompute_modules or ()) or args.disable_bias_linear,
        "--recompute-modules mlp needs --disable-bias-linear",
    )
    _require(
        not args.overlap_param_gather
        or (args.use_distributed_optimizer and args.overlap_grad_reduce),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    )
    _require(
        not args.wait_for_input or args.world_size == 1,
        "--wait-for-input works for one process, whose standard input is that of this command",
    )
    _require(
        bool(args.data_path) != args.mock_data, "give either --data-path PREFIX or --mock-data"
    )
    _require(
        args.tokenizer_type != "HuggingFaceTokenizer" or args.tokenizer_model is not None,
        "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model FILE",
    )
    _require(
        args.dataloader_type == "default" or _has_dali(),
        "--dataloader-type dali needs NVIDIA DALI, which is not installed; "
        "install it with: pip install 'nvidia-dali-cuda130>=2.4,<3'",
    )


def _set_defaults(args: argparse.Namespace) -> None:
    """Fills in the defaults that depend on other flags or on the launcher's environment."""
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", str(args.rank)))
    args.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(args.world_size)))
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.ffn_hidden_size is None:
        # A gated unit has three matrices instead of two: two thirds of the width, as Megatron-LM.
        gated = max(64, int(4 * args.hidden_size * 2 / 3) // 64 * 64)
        args.ffn_hidden_size = gated if args.swiglu else 4 * args.hidden_size
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    if args.tokenizer_type is None:
        args.tokenizer_type = "HuggingFaceTokenizer" if args.tokenizer_model else "NullTokenizer"
    if args.metrics_file is None and args.save is not None:
        args.metrics_file = args.save / "metrics.jsonl"
    if args.cpu_threads is None:
        args.cpu_threads = max(1, len(os.sched_getaffinity(0)) // args.local_world_size)


def check_outputs(args: argparse.Namespace) -> None:
    """Raises UserError if what this rank writes has no place: found at once, not after steps."""
    places = {"--save": _file_in(args.save), "--data-cache-path": _file_in(args.data_cache_path)}
    if args.rank == 0:
        places["--tensorboard-dir"] = _file_in(args.tensorboard_dir)
        places["--metrics-file"] = args.metrics_file
    for flag, path in places.items():
        try:
            if path is not None:
                check_place(path)
        except OSError as error:
            raise UserError(f"{flag} has no place: {error}; give another path") from None


def _file_in(directory: str | Path | None) -> Path | None:
    return None if directory is None else Path(directory) / "file"


def parse_arguments(
    description: str,
    argv: Sequence[str] | None = None,
    extra_args: Sequence[Callable[[argparse.ArgumentParser], object]] = (),
) -> argparse.Namespace:
    """Parses and checks the command line.

    Args:
        description: First line of --help.
        argv: The arguments; default: the process's.
        extra_args: Functions that add further groups to the parser.

    Returns:
        The flags, with derived values: rank, world_size, local_rank, local_world_size,
        data_parallel_size, num_microbatches and virtual_pipeline_model_parallel_size.

    Raises:
        UserError: Values that do not fit together. A malformed flag exits with code 2 at once.
    """
    parser = Parser(
        prog=program(),
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    groups = (_add_network_args, _add_training_args, _add_parallel_args, _add_data_args)
    for add in (*groups, _add_report_args, *extra_args):
        add(parser)
    args = parser.parse_args(argv)
    _set_defaults(args)
    _set_layout(args)
    _check_combinations(args)
    return args
