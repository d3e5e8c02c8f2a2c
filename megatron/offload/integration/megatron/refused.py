# SPDX-License-Identifier: Apache-2.0
"""Which settings of Megatron cannot be had with what of ours, and why: a `Refusals` for each.

`docs/refusals.md` is generated from these tables. What depends on more than one setting, on the
model or on a library is checked where it is set up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.offload.errors import (
    GRADIENTS_PREFIX,
    PARAMETERS_PREFIX,
    PREFIX,
    STATES_PREFIX,
    STEPS_PREFIX,
    ConfigurationError,
)

# Values that change nothing, where that is neither False nor 0 nor "none".
_USUAL = {"gtp_weight_remat_size": 1, "num_distributed_optimizer_instances": 1}


@dataclass(frozen=True)
class Refusals:
    """What cannot be had with one thing that we do.

    Attributes:
        what: that thing, as sentences name it.
        settings: fields of Megatron's configurations, or its flags, each with the reason; with what
            to do as well where that is not to drop the flag of this name.
        prefix: of the sentences.
    """

    what: str
    settings: Mapping[str, str | tuple[str, str]]
    prefix: str = PREFIX

    def check(self, settings: Any) -> None:
        """Makes sure that none of them is set.

        Args:
            settings: Megatron's flags, or one of its configurations.

        Raises:
            ConfigurationError: one is.
        """
        for name in self.settings:
            value = getattr(settings, name, None)
            if value and value != _USUAL.get(name, "none"):
                raise self.refusal(name, value)

    def refusal(self, name: str, value: Any = True) -> ConfigurationError:
        """The error for one of them."""
        shown = f"{name} {value}" if isinstance(value, str) else name
        reason, advice = self.why(name)
        return ConfigurationError(
            f"{self.prefix}{shown} cannot be combined with {self.what}: {reason}; {advice}"
        )

    def why(self, name: str) -> tuple[str, str]:
        """The reason, and what to do."""
        found = self.settings[name]
        return (found, f"drop --{name.replace('_', '-')}") if isinstance(found, str) else found


_BOTH_MOVE = "both would move the same activations"
_GRAPHS = ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl")
_UNTRIED = "it has not been tried"

ACTIVATIONS = Refusals(
    "offload",
    {
        "cpu_offloading": _BOTH_MOVE,
        "fine_grained_activation_offloading": _BOTH_MOVE,
        "moe_paged_stash": _BOTH_MOVE,
        "distribute_saved_activations": "it divides what checkpoints keep among ranks by itself",
        "overlap_moe_expert_parallel_comm": "its schedule calls none of the hooked functions",
        "hybrid_context_parallel": "its schedule gives micro-batches to ranks on its own",
        "overlap_dispatch_backward_with_experts_wgrad": (
            "it needs activations after the layer's backward pass"
        ),
        **dict.fromkeys(_GRAPHS, "a captured graph has fixed addresses"),
    },
)

# Megatron-LM writes what hooks of modules see.
_SAVES = ("save_activations_interval", "save_dgrads_interval")

# With which the logits are needed, or something else makes the loss.
CHUNKED_LOSS = Refusals(
    "--activation-chunked-loss",
    {
        "cross_entropy_loss_fusion": "both would compute the loss",
        "mtp_num_layers": "multi-token prediction computes losses of its own",
        "use_mup": "it scales the logits",
        "defer_embedding_wgrad_compute": "it keeps the logits' gradients",
        "overlap_moe_expert_parallel_comm": "its schedule runs the output layer by itself",
        "config_logger_dir": "it logs the logits",
        "logits_save_dir": "it saves the logits",
        "logits_load_dir": "its loss is made of the logits",
        **dict.fromkeys(_SAVES, "what the output layer gives would be missing"),
    },
)

# With which a tile is not what all tokens are.
TILED_MLP = Refusals(
    "--activation-tiled-mlp",
    {
        **dict.fromkeys(("fp8", "fp4"), "a tile would be scaled by its own values"),
        "use_te_activation_func": _UNTRIED,
        "use_kitchen": _UNTRIED,
        "delay_wgrad_compute": "it needs what a tile saved after the layer's backward pass",
        "overlap_moe_expert_parallel_comm": "its schedule runs parts of a layer by itself",
        **dict.fromkeys(_SAVES, "it would save one tile of each MLP"),
        **dict.fromkeys(_GRAPHS, "a captured graph has fixed addresses"),
    },
)

_OF_ONE_PASS = "what it measures of the weights belongs to one pass of the whole model"
_COUNTS_LAYERS = "it counts layers of one pass at a time"
STEPS = Refusals(
    "--layer-major-units",
    {
        "fp8": _OF_ONE_PASS,
        "fp4": _OF_ONE_PASS,
        "overlap_moe_expert_parallel_comm": "its schedule runs two micro-batches at a time",
        "hybrid_context_parallel": "its schedule gives micro-batches to ranks on its own",
        "cpu_offloading": _COUNTS_LAYERS,
        "fine_grained_activation_offloading": _COUNTS_LAYERS,
        "moe_paged_stash": _COUNTS_LAYERS,
        "moe_enable_routing_replay": "routers are told the choices of one micro-batch at a time",
        **dict.fromkeys(_GRAPHS, "a captured graph fixes the order of layers"),
    },
    STEPS_PREFIX,
)

_CONVERTED_TOGETHER = ("all ranks convert all weights together", "drop --fp8-param-gather")
STATES = Refusals(
    "state offload",
    {
        "optimizer_cpu_offload": "both would move the same states",
        "offload_optimizer_states": "both would move the same states",
        "use_megatron_fsdp": (
            "it keeps main weights itself",
            "use DistributedDataParallel, with the distributed optimizer",
        ),
        "use_torch_fsdp2": (
            "it gives parameters other memory for each layer",
            "use DistributedDataParallel, with the distributed optimizer",
        ),
        "reuse_grad_buf_for_mxfp8_param_ag": "main weights would be read after the step",
        "fp8_param_gather": _CONVERTED_TOGETHER,
        "fp8_param": _CONVERTED_TOGETHER,
        "log_params_norm": "it reads all main weights, which are away",
        "qk_clip": "it changes main weights after the step, when they are away",
        "async_save": (
            "its writer goes on during the next step, which moves states, and needs a copy of all "
            "of them in memory"
        ),
    },
    STATES_PREFIX,
)

# What looks at parameters, or changes them, between two steps, or has their addresses.
PARAMETERS = Refusals(
    "--parameter-offload",
    {
        **dict.fromkeys(_GRAPHS, "a captured graph has the addresses that parameters had then"),
        "log_params_norm": "it would be the norm of parameters that are away",
        "check_weight_hash_across_dp_replicas_interval": (
            "parameters that are away look the same on all replicas"
        ),
        "save_params_interval": (
            "it would save parameters that are away",
            "drop --save-params-interval, and use --save",
        ),
        "qk_clip": "it changes weights after the optimizer's step, when they are away",
        "async_save": "its writer goes on during the next step, which moves them",
    },
    PARAMETERS_PREFIX,
)
SHARDED_PARAMETERS = Refusals(
    "--parameter-offload and the distributed optimizer",
    {
        "overlap_param_gather": (
            "it brings parameters together in the next forward pass, when they would have to be "
            "written"
        ),
        "nccl_ub": (
            "it registers the memory of parameters, which comes and goes",
            "drop --use-nccl-ub",
        ),
        "fp8_param_gather": _CONVERTED_TOGETHER,
        "fp4_param_gather": "all ranks convert all weights together",
        "optimizer_cpu_offload": (
            "it updates copies of all weights on the CPU",
            "drop --optimizer-cpu-offload, and use --optimizer-state-offload",
        ),
        "num_distributed_optimizer_instances": _UNTRIED,
    },
    PARAMETERS_PREFIX,
)
GRADIENTS = Refusals(
    "--gradient-offload on",
    {
        "fp16": ("its loss scaling divides all gradients at once", "use --bf16, which needs none"),
        "grad_reduce_in_bf16": "gradients must be fp32",
        "calculate_per_token_loss": "it divides all gradients once all of them are there",
        "log_num_zeros_in_grad": "it looks at all of them",
        "check_for_large_grads": _UNTRIED,
        "save_wgrads_interval": "it saves all of them",
        "nccl_ub": (
            "it registers the memory of gradients, which comes and goes",
            "drop --use-nccl-ub",
        ),
    },
    GRADIENTS_PREFIX,
)

# Flags of Megatron-LM that change what the launcher hooks.
LAUNCHER = Refusals(
    "offload",
    {
        "use_legacy_models": "its layers are not megatron-core's",
        **dict.fromkeys(
            (
                *("use_megatron_fsdp", "use_torch_fsdp2", "inprocess_restart", "perform_rl_step"),
                "gtp_weight_remat_size",
            ),
            _UNTRIED,
        ),
    },
)

ALL = {
    "Activations": ACTIVATIONS,
    "The loss over chunks": CHUNKED_LOSS,
    "MLPs over tiles": TILED_MLP,
    "Layer-major steps": STEPS,
    "Optimizer states": STATES,
    "Parameters": PARAMETERS,
    "Parameters with the distributed optimizer": SHARDED_PARAMETERS,
    "Gradients": GRADIENTS,
    "The launcher": LAUNCHER,
}
