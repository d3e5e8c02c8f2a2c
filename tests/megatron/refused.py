# SPDX-License-Identifier: Apache-2.0
"""What is refused, a row for each combination, with the sentence that a person gets.

`test_refusals.py` goes through it, and fails where the sources refuse something that has no row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

SSD = "--activation-offload ssd --activation-offload-dir {tmp}"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"


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
    (
        {"disable_parameter_transpose_cache": True, "fp8": "hybrid"},
        "drop --disable-parameter-transpose-cache",
    ),
    (
        {"disable_parameter_transpose_cache": True, "fp4": "e2m1"},
        "drop --disable-parameter-transpose-cache",
    ),
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# What `check_chunked_loss` refuses.
LOSS_SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"cross_entropy_loss_fusion": True}, "drop --cross-entropy-loss-fusion"),
    ({"mtp_num_layers": 1}, "drop --mtp-num-layers"),
    ({"use_mup": True}, "drop --use-mup"),
    ({"defer_embedding_wgrad_compute": True}, "drop --defer-embedding-wgrad-compute"),
    ({"overlap_moe_expert_parallel_comm": True}, "its schedule runs the output layer by itself"),
    ({"config_logger_dir": "log"}, "drop --config-logger-dir"),
    ({"logits_save_dir": "logits"}, "drop --logits-save-dir"),
    ({"logits_load_dir": "logits"}, "drop --logits-load-dir"),
    ({"save_activations_interval": 2}, "what the output layer gives would be missing"),
    ({"save_dgrads_interval": 2}, "what the output layer gives would be missing"),
)
# What the check of tiled MLPs refuses.
MLP_SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"fp8": "hybrid"}, "a tile would be scaled by its own values; drop --fp8"),
    ({"fp4": "e2m1"}, "a tile would be scaled by its own values; drop --fp4"),
    ({"use_te_activation_func": True}, "drop --use-te-activation-func"),
    ({"use_kitchen": True}, "drop --use-kitchen"),
    ({"delay_wgrad_compute": True}, "drop --delay-wgrad-compute"),
    ({"overlap_moe_expert_parallel_comm": True}, "its schedule runs parts of a layer by itself"),
    ({"save_activations_interval": 2}, "it would save one tile of each MLP"),
    ({"save_dgrads_interval": 2}, "it would save one tile of each MLP"),
    ({"enable_cuda_graph": True}, "a captured graph has fixed addresses"),
    ({"external_cuda_graph": True}, "a captured graph has fixed addresses"),
    ({"cuda_graph_impl": "local"}, "a captured graph has fixed addresses"),
    ({"num_moe_experts": 2, "moe_layer_freq": 1}, "each layer of this model has experts"),
    ({"num_moe_experts": 2, "moe_layer_freq": [1, 1]}, "each layer of this model has experts"),
)
OTHER_VERSION = {"megatron.core.__version__": "0.99.0"}

OFFLOAD = (
    *(Row(SSD, sentence, settings=settings) for settings, sentence in SETTINGS),
    Row(
        f"{SSD} {FULL} --activation-recompute-input keep",
        "leaves no activations to offload; drop one of the two",
    ),
    Row(
        f"{SSD} {FULL} --activation-recompute-layers 1",
        "--activation-recompute-layers decides which layers are recomputed, and so does",
    ),
    Row(
        f"--activation-offload auto {FULL}",
        "--activation-offload auto decides which layers are recomputed, and so does",
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
    Row(f"{SSD} --activation-offload-layers 0", "--activation-offload-layers names layer 0"),
    Row(f"{SSD} --activation-offload-layers 1-5", "--activation-offload-layers names layer 5"),
    Row(f"{SSD} --activation-recompute-layers 5", "--activation-recompute-layers names layer 5"),
    Row(
        f"{SSD} --activation-memory-budget 1GiB",
        "--activation-memory-budget is for --activation-offload auto",
    ),
    Row(
        "--activation-offload auto --activation-memory-budget 0",
        "--activation-memory-budget is less than a byte, which leaves no memory to compute",
    ),
    Row(
        "--activation-offload auto --activation-recompute-layers 1",
        "chooses layers, and so does --activation-offload auto",
    ),
    Row(
        "--activation-offload auto --activation-offload-max-slowdown -1",
        "'-1' is no slowdown",
    ),
    Row(SSD, "megatron-core 0.99.0 is not supported", patches=OTHER_VERSION),
    Row("--activation-offload ssd", "--activation-offload ssd needs a place on an SSD"),
    Row("--activation-offload tiered", "--activation-offload tiered needs a place on an SSD"),
    Row(
        "--activation-offload keep --activation-replay off",
        "keep moves nothing, and without replay or a codec it spares",
    ),
    Row("--activation-codec int8", "give keep, ssd, host, tiered or auto instead"),
    Row("--activation-replay on", "give keep, ssd, host, tiered or auto instead"),
    Row(
        f"{SSD} --activation-offload-io gds --activation-offload-verify checksum",
        "--activation-offload-verify checksum reads every byte in host memory",
    ),
    Row("--activation-recompute-layers 1", "--activation-recompute-layers needs"),
    Row(
        f"{SSD} --activation-recompute-input ssd",
        "names; name them, give --recompute-granularity full, or leave it out",
    ),
    Row(  # without an SSD too, which is not what is wrong
        "--activation-recompute-input ssd",
        "names; give both with --activation-offload ssd, host or tiered, or leave it out",
    ),
    Row(
        "--activation-recompute-layers 1 --activation-recompute-input ssd",
        "--activation-recompute-layers needs --activation-offload",
    ),
    Row(
        "--activation-offload host --activation-recompute-layers 1"
        " --activation-recompute-input ssd",
        "--activation-recompute-input ssd needs a place on an SSD",
    ),
    Row(
        "--activation-offload auto --activation-recompute-input host",
        "--activation-recompute-input host chooses where inputs wait, and so does",
    ),
    Row("--activation-offload-trace t.json", "--activation-offload-trace shows what offload does"),
    Row("--activation-memory-report m.jsonl", "--activation-memory-report shows what offload does"),
    Row(
        f"{SSD} --activation-recompute-layers 1-3 --activation-offload-layers 2",
        "both name 2; take it out of one of them",
    ),
    Row(f"{SSD},{{tmp}}", "names a directory twice"),
    Row(f"{SSD}/missing", "does not exist"),
    Row("--activation-offload ssd --activation-offload-dir /dev/null", "is not a directory"),
    Row(f"{SSD} --activation-offload-ssd-budget 900TiB", "cannot hold the activations"),
    Row(
        "--activation-offload host --activation-offload-host-budget 900TiB",
        "more host memory than there is",
    ),
    Row(f"{SSD} --activation-offload-io gds", "needs a CUDA device"),
    Row(f"{SSD} --activation-offload-inflight 1KiB", "is below --activation-offload-min-bytes"),
    Row("--activation-offload-min-bytes 1apple", "'1apple' is not a size"),
    Row("--activation-offload-write-limit 0", "'0' lets nothing through"),
    Row("--activation-offload-min-bytes 0.5", "'0.5' is not a size: a byte has no parts"),
    Row("--activation-offload-min-bytes 9000PiB", "'9000PiB' is more than any disk or memory has"),
    Row("--activation-offload-threads 4096", "'4096' is not allowed; the largest value is 1024"),
    Row("--activation-offload-host-budget 1.5", "'1.5' is neither a fraction nor a size"),
    Row("--activation-offload-threads many", "'many' is not a whole number"),
    Row("--activation-offload-threads 0", "0 is not allowed; the smallest value is 1"),
    Row("--activation-chunked-loss 0", "'0' is neither off, auto nor a number of tokens"),
    *(
        Row("--activation-chunked-loss auto", sentence, settings=settings)
        for settings, sentence in LOSS_SETTINGS
    ),
    Row("--activation-tiled-mlp many", "'many' is neither off, auto nor a number of tokens"),
    *(
        Row("--activation-tiled-mlp auto", sentence, settings=settings)
        for settings, sentence in MLP_SETTINGS
    ),
    Row("--optimizer-state-offload ssd", "--optimizer-state-offload ssd needs a place on an SSD"),
    Row(
        "--optimizer-state-offload ssd --optimizer-state-dir {tmp},{tmp}",
        "--optimizer-state-dir names a directory twice",
    ),
    Row(
        "--optimizer-state-offload host --optimizer-state-bucket 0",
        "argument --optimizer-state-bucket: '0' is less than a byte",
    ),
    Row(
        "--optimizer-state-offload host",
        "megatron-core 0.99.0 is not supported",
        patches=OTHER_VERSION,
    ),
    Row("--activation-offload-layers a", "'a' names no layers"),
    Row("--activation-offload tape", "invalid choice: 'tape'"),
)
UNITS = "--layer-major-units 2"
# What `check_layer_major` refuses of a TransformerConfig, with offload and without.
STEPS_SETTINGS: tuple[dict[str, Any], ...] = (
    {"fp8": "hybrid"},
    {"fp4": "e2m1"},
    {"overlap_moe_expert_parallel_comm": True},
    {"hybrid_context_parallel": True},
    {"cpu_offloading": True},
    {"fine_grained_activation_offloading": True},
    {"moe_paged_stash": True},
    {"moe_enable_routing_replay": True},
    {"enable_cuda_graph": True},
    {"external_cuda_graph": True},
    {"cuda_graph_impl": "local"},
)
GLOBAL_AUX_LOSS: tuple[Any, ...] = ("global_aux_loss", ["aux_loss", "global_aux_loss"])
STEPS = (
    *(
        Row(UNITS, "cannot be combined with --layer-major-units", settings=one)
        for one in STEPS_SETTINGS
    ),
    *(
        Row(
            f"{UNITS} --layer-major-order alternating",
            "that loss depends on the micro-batches before; use ascending",
            settings={"moe_router_load_balancing_type": one},
        )
        for one in GLOBAL_AUX_LOSS
    ),
    Row(f"{UNITS} {PP2}", "--layer-major-units needs a model on one pipeline stage", 2),
    Row(f"{UNITS} {FULL}", "checkpoints hide the layers; use --activation-recompute-layers"),
    Row(
        f"{UNITS} --activation-boundary host",
        "--activation-boundary host needs --activation-offload ssd, host or tiered, got off",
    ),
    Row(
        "--activation-offload host --activation-boundary host",
        "is for what waits between the units of --layer-major-units",
    ),
    Row("--layer-major-eval on", "is for the units of --layer-major-units"),
    Row(
        f"{UNITS} {TP2} --sequence-parallel --layer-major-eval on",
        "--layer-major-eval on cannot be combined with --sequence-parallel",
        2,
    ),
    Row("--layer-major-units 0", "'0' is neither off, auto nor a number of units"),
    Row(UNITS, "megatron-core 0.99.0 is not supported", patches=OTHER_VERSION),
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
    Row("--metrics-file {tmp}", "--metrics-file has no place"),
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
    Row("--wait-for-input", "--wait-for-input works for one process", 2),
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
TABLE = (*OFFLOAD, *STEPS, *TRAINER, *LAYOUT)
