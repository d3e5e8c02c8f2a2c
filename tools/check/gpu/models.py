# SPDX-License-Identifier: Apache-2.0
"""Models of megatron-core as a trainer builds and runs them: `start_megatron`, `Trainee`.

GPT, BERT and T5 with core's own (local) layers, a Llama-like GPT with torch's fused attention,
experts, and GPT of Transformer Engine's layers; wrapped for data parallelism, run by
megatron-core's schedule, on random tokens. The section `parity` and those after it make them.
Nothing here knows of offload.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from check.gpu.settings import Size
from megatron.offload.integration.megatron import cpu_runtime

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Batch = dict[str, torch.Tensor]
_DROPOUT = 0.1


def start_megatron(device: torch.device, seed: int) -> None:
    """Starts the process group and megatron-core's groups of one rank, once; seeds everything.

    Raises:
        ImportError: megatron-core is not installed.
    """
    warnings.filterwarnings("ignore")
    for name in ("megatron.core", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from megatron.core import parallel_state

    cpu_runtime.activate()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    seed_everything(seed)


def seed_everything(seed: int) -> None:
    """Weights and dropout masks follow from it."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def config_of(size: Size, dtype: torch.dtype, **changes: Any) -> Any:
    """A TransformerConfig of this shape, with dropout."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {
        "num_layers": size.num_layers,
        "hidden_size": size.hidden,
        "ffn_hidden_size": 4 * size.hidden,
        "num_attention_heads": size.num_heads,
        "attention_dropout": _DROPOUT,
        "hidden_dropout": _DROPOUT,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**values, **changes})


def _gpt(size: Size, dtype: torch.dtype, **common: Any) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec()
    return GPTModel(config_of(size, dtype), spec, **common)


def _llama(size: Size, dtype: torch.dtype, **common: Any) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    from trainer.attention import SdpaAttention  # calls torch's fused kernel

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    config = config_of(
        size,
        dtype,
        ffn_hidden_size=8 * size.hidden // 3 // 64 * 64 or 64,
        num_query_groups=max(size.num_heads // 4, 1),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    common |= {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return GPTModel(config, spec, **common)


def _bert(size: Size, dtype: torch.dtype, **common: Any) -> torch.nn.Module:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    config, num_tokentypes = config_of(size, dtype), 0
    return BertModel(config, num_tokentypes, bert_layer_local_spec, add_binary_head=False, **common)


def _t5(size: Size, dtype: torch.dtype, **common: Any) -> torch.nn.Module:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    return T5Model(
        config_of(size, dtype),
        config_of(size, dtype),
        t5_spec.get_t5_encoder_with_local_block_spec(size.num_layers),
        t5_spec.get_t5_decoder_with_local_block_spec(size.num_layers),
        **common,
    )


def _experts_config(size: Size) -> dict[str, Any]:
    """Of a mixture of experts; on a GPU the shared ones compute on a stream of their own."""
    return {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": 2 * size.hidden,
        "moe_shared_expert_overlap": torch.cuda.is_available(),
        "add_bias_linear": False,
    }


def _experts(size: Size, dtype: torch.dtype, **common: Any) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(size, dtype, **_experts_config(size))
    return GPTModel(config, get_gpt_layer_local_spec(num_experts=4), **common)


def _te(
    size: Size, dtype: torch.dtype, *, experts: bool = False, fp8: bool = False, **common: Any
) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec as layer_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    changes: dict[str, Any] = _experts_config(size) | {"moe_grouped_gemm": True} if experts else {}
    if fp8:
        # None of them has scales that steps before have left: two runs can be compared.
        recipes = {8: "tensorwise", 9: "blockwise"}
        recipe = recipes.get(torch.cuda.get_device_capability()[0], "mxfp8")
        changes |= {"fp8": "hybrid" if recipe == "tensorwise" else "e4m3", "fp8_recipe": recipe}
    spec = layer_spec(num_experts=4, moe_grouped_gemm=True) if experts else layer_spec()
    return GPTModel(config_of(size, dtype, **changes), spec, **common)


Builder = Callable[..., torch.nn.Module]
BUILDERS: dict[str, Builder] = {"GPT": _gpt, "Llama-like": _llama, "BERT": _bert, "T5": _t5}
OTHER_BUILDERS: dict[str, Builder] = {
    "experts": _experts,
    "TE GPT": _te,
    "TE GPT FP8": functools.partial(_te, fp8=True),
    "TE experts": functools.partial(_te, experts=True),
    "TE experts FP8": functools.partial(_te, experts=True, fp8=True),
}


class Trainee:
    """A model under megatron-core's data parallelism and schedule.

    Args:
        kind: a key of `BUILDERS` or `OTHER_BUILDERS`.
        size: shape of the model and its micro-batches.
        dtype: of its weights and activations.
        vocab_size: of its embedding.
        device: where it is trained.
    """

    def __init__(
        self, kind: str, size: Size, dtype: torch.dtype, vocab_size: int, device: torch.device
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module

        model: Any = {**BUILDERS, **OTHER_BUILDERS}[kind](
            size,
            dtype,
            vocab_size=vocab_size,
            max_sequence_length=size.seq_length,
            share_embeddings_and_output_weights=True,
        ).to(device)
        self.kind = kind
        self.size = size
        self.config = model.config
        self.model = model
        self.after_forward: Callable[[], None] = lambda: None
        wrapped = Float16Module(model.config, model) if model.config.bf16 else model
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.chunk = DistributedDataParallel(model.config, ddp_config, wrapped)
        self.chunk.train()
        self.config.finalize_model_grads_func = finalize_model_grads
        self._vocab_size = vocab_size
        self._device = device
        self._forward_backward = get_forward_backward_func(pp_size=1, vp_size=None)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def batches(self, num_microbatches: int, seed: int) -> list[Batch]:
        """Random tokens, on the device; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.size.micro_batch, self.size.seq_length)

        def tokens() -> torch.Tensor:
            return torch.randint(0, self._vocab_size, shape, generator=generator).to(self._device)

        return [
            {name: tokens() for name in ("tokens", "labels", "decoder_tokens")}
            for _ in range(num_microbatches)
        ]

    def step(self, batches: list[Batch]) -> torch.Tensor:
        """Runs forward and backward of all micro-batches.

        Returns:
            The micro-batches' losses, on the device.
        """
        self.chunk.zero_grad_buffer()
        reports = self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=iter(batches),
            model=self.chunk,
            num_microbatches=len(batches),
            seq_length=self.size.seq_length,
            micro_batch_size=self.size.micro_batch,
            forward_only=False,
        )
        return torch.stack([report["loss"] for report in reports])

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and what the last step left for the optimizer, in fp32."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.main_grad

    def _forward_step(self, batches: Iterator[Batch], chunk: torch.nn.Module) -> Any:
        batch = next(batches)
        output = self._call(batch, chunk)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            self.after_forward()
            value = output.float().mean()
            return value, {"loss": value.detach().clone()}

        return output, loss

    def _call(self, batch: Batch, chunk: torch.nn.Module) -> torch.Tensor:
        """The losses of all tokens, [batch, sequence]."""
        tokens, labels = batch["tokens"], batch["labels"]
        length = tokens.shape[1]
        if self.kind == "BERT":
            present = torch.ones_like(tokens)
            present[:, -(length // 8) :] = 0  # padding
            output: torch.Tensor = chunk(tokens, present, lm_labels=labels)[0]
            return output
        if self.kind == "T5":
            full = tokens.new_zeros((tokens.shape[0], 1, length, length), dtype=torch.bool)
            padded = full.clone()
            padded[..., -(length // 8) :] = True  # True: attention is forbidden
            causal = full.logical_not().triu(1)
            output = chunk(
                tokens, batch["decoder_tokens"], padded, causal, padded, lm_labels=labels
            )
            return output
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        output = chunk(tokens, positions, None, labels=labels)
        return output
