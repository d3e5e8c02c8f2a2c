# SPDX-License-Identifier: Apache-2.0
"""A transformer and how it is divided: `Transformer`, `Parallelism`.

Only sizes; what a layer saves and computes follows from them in `layer.py`. Names and defaults are
those of Megatron's flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.offload.errors import ConfigurationError

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Experts:
    """MLPs of which each token goes through some, as Megatron's flags `--num-experts` and so on.

    Attributes:
        number: of experts in a layer.
        topk: that a token goes through.
        ffn_hidden_size: width inside each; None: that of the model's MLP.
        shared_size: width inside an MLP beside them that all tokens go through; 0: there is none.
        every: the first layer has experts, and each after so many layers.
    """

    number: int
    topk: int = 2
    ffn_hidden_size: int | None = None
    shared_size: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        if self.topk > self.number:
            raise ConfigurationError(
                f"--moe-router-topk {self.topk} is more than --num-experts {self.number}; change "
                "one of them"
            )


@dataclass(frozen=True)
class Transformer:
    """A decoder as GPT has it.

    Attributes:
        num_query_groups: heads that have keys and values of their own; None: all.
        kv_channels: width of a head; None: hidden size divided by heads.
        ffn_hidden_size: None: four times the hidden size, of a gated unit two thirds of that.
        gated: SwiGLU and its like, with two matrices before the activation function.
        rope: rotary positions: queries and keys are saved once more, rotated.
        dtype: of activations, a key of `ELEMENT_BYTES`.
        flash_attention: attention saves no (sequence x sequence) tensor.
        selective_recompute: without flash attention: those tensors are made again in backward.
        fused_kernels: activation function, dropout and norms in kernels that save only their
            inputs and a mask of one byte, as on a GPU. False: as plain torch on a CPU.
        eager: an operation of torch for each line of Python, as in the models of transformers:
            norms compute in fp32, and queries, keys and values have matrices of their own.
        chunked_loss: the head keeps no logits, and makes them again in backward, chunk by chunk.
        tiled_mlp: MLPs keep their input alone, and run again in backward, tile by tile.
        experts: in the place of MLPs of some layers; None: there are none.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int = 51200
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    gated: bool = False
    rope: bool = False
    rms_norm: bool = False
    tied_embeddings: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    dtype: str = "bf16"
    flash_attention: bool = True
    selective_recompute: bool = False
    fused_kernels: bool = True
    eager: bool = False
    chunked_loss: bool = False
    tiled_mlp: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigurationError(
                f"activations of type {self.dtype!r} are not known; choose one of "
                f"{', '.join(ELEMENT_BYTES)}"
            )
        if self.hidden_size % self.num_attention_heads and self.kv_channels is None:
            raise ConfigurationError(
                f"--hidden-size {self.hidden_size} is no multiple of --num-attention-heads "
                f"{self.num_attention_heads}; change one or give --kv-channels"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Width of the keys of all query groups; that of the values is the same."""
        return (self.num_query_groups or self.num_attention_heads) * self.head_size

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP, of one of its halves where it is gated."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        # As Megatron: as many weights as without a gate, rounded down.
        return 8 * self.hidden_size // 3 // 64 * 64 if self.gated else 4 * self.hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether a layer of the whole model has some; layers count from 1."""
        return self.experts is not None and (layer - 1) % self.experts.every == 0

    @property
    def expert_size(self) -> int:
        """Width inside one expert."""
        return (self.experts and self.experts.ffn_hidden_size) or self.ffn_size

    @property
    def layer_parameters(self) -> int:
        """Number of weights in one layer's matrices, of a layer without experts."""
        return self._attention_parameters + self._mlp_parameters(self.ffn_size)

    def parameters_outside_experts(self, layer: int) -> int:
        """The same of a layer, which counts from 1, without those of its experts."""
        if self.experts is None or not self.has_experts(layer):
            return self.layer_parameters
        router = self.hidden_size * self.experts.number
        return self._attention_parameters + router + self._mlp_parameters(self.experts.shared_size)

    def expert_parameters(self, layer: int) -> int:
        """Weights of all experts of a layer, which counts from 1."""
        if self.experts is None or not self.has_experts(layer):
            return 0
        return self.experts.number * self._mlp_parameters(self.expert_size)

    @property
    def parameters(self) -> int:
        """Weights of the whole model's matrices."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        layers = range(1, self.num_layers + 1)
        return embeddings + sum(
            self.parameters_outside_experts(one) + self.expert_parameters(one) for one in layers
        )

    @property
    def flops_per_token(self) -> float:
        """Operations of forward and backward that the model asks for, for each token.

        No recomputation counts, and of attention only what a causal mask leaves.
        """
        weights = self.vocab_size * self.hidden_size
        for layer in range(1, self.num_layers + 1):
            weights += self.parameters_outside_experts(layer)
            if self.experts is not None and self.has_experts(layer):
                weights += self.experts.topk * self._mlp_parameters(self.expert_size)
        scores = 2 * self.num_layers * self.seq_length * self.query_size  # of two products
        return 6.0 * (weights + scores * 0.5)

    @property
    def _attention_parameters(self) -> int:
        return self.hidden_size * (2 * self.query_size + 2 * self.key_size)

    def _mlp_parameters(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden_size * width


@dataclass(frozen=True)
class Parallelism:
    """How model and batch are divided among ranks.

    Attributes:
        tensor, pipeline, data: ranks of each part.
        virtual: model chunks of each pipeline stage.
        sequence_parallel: norms and dropout are divided among the tensor-parallel ranks too.
        micro_batch_size: samples of one pass.
        global_batch_size: samples of one step of all ranks.
        group_size: micro-batches that a chunk runs in a row; None: as many as stages.
        expert: of the data-parallel ranks, those that have a part of the experts each.
    """

    micro_batch_size: int = 1
    global_batch_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    sequence_parallel: bool = False
    group_size: int | None = None
    expert: int = 1

    def __post_init__(self) -> None:
        together = self.micro_batch_size * self.data
        if self.global_batch_size % together:
            raise ConfigurationError(
                f"--global-batch-size {self.global_batch_size} is no multiple of "
                f"--micro-batch-size {self.micro_batch_size} times {self.data} data-parallel "
                "ranks; change one of them"
            )
        if self.data % self.expert:
            raise ConfigurationError(
                f"--expert-model-parallel-size {self.expert} does not divide the {self.data} "
                "data-parallel ranks; change it or --num-gpus"
            )
        if self.virtual > 1 and (self.pipeline < 2 or self.num_micro_batches % self.pipeline):
            raise ConfigurationError(
                "virtual pipeline stages need at least two pipeline stages and a number of "
                f"micro-batches that is a multiple of them, got {self.pipeline} stages and "
                f"{self.num_micro_batches} micro-batches; change --global-batch-size"
            )

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in one rank's step."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, of all kinds of parallelism together."""
        return self.tensor * self.pipeline * self.data

    def layers_of_chunk(self, model: Transformer, stage: int, chunk: int) -> range:
        """Numbers of a chunk's layers in the whole model, beginning with 1.

        Raises:
            ConfigurationError: the layers cannot be divided evenly.
        """
        chunks = self.pipeline * self.virtual
        if model.num_layers % chunks:
            raise ConfigurationError(
                f"--num-layers {model.num_layers} is no multiple of {self.pipeline} pipeline "
                f"stages times {self.virtual} chunks; change one of them"
            )
        length = model.num_layers // chunks
        first = (chunk * self.pipeline + stage) * length + 1
        return range(first, first + length)
