# SPDX-License-Identifier: Apache-2.0
"""What one transformer layer saves, computes and sends in one pass: `layer_work`.

Saved bytes follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), section 4, storage by storage instead of summed up, so that one rule
holds for every element type, grouped queries and gated MLPs; `test_projection_bytes.py` compares
them with what the engine moves. For one tensor-parallel rank and one micro-batch.

Note [What replay spares]
Norms, activation functions and the product of a gated unit are computed again of what they read,
each with one pass over its operands and its result. A norm that computes in fp32 saves its input in
fp32; with replay, the narrower input in its place. Nothing else of a layer is replayed: products of
matrices, attention, rotated queries and keys of which the originals are not saved, dropout's masks.

Note [Experts]
Tokens are taken to be shared out evenly: each rank gets as many from other ranks as it sends. Kept
are, for each expert of a token, its input, what goes into the activation function and what comes
out of it, which its probability has multiplied; and the router's scores of all experts. The kernels
of a GPU fuse activation function and probability; plain torch keeps the product's operand too.
What could be replayed of it in plain torch is not counted, and experts run again as a whole or not
at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.offload.ops.chunked_logits import chunk_tokens_for
from megatron.offload.ops.tiled_mlp import tile_tokens_of
from megatron.offload.planner.projection.model import Experts, Parallelism, Transformer

# Backward passes of a matrix product compute two products; of flash attention five instead of two
# (arXiv 2205.14135, section 3.1: the scores are computed again).
MATMUL_BACKWARD = 2.0
FLASH_BACKWARD = 2.5
SCORES_BACKWARD = 2.0

# Names of what is saved: of flash attention beside its output; and of an MLP between its matrices.
LOG_SUM_EXP = "log-sum-exp"
INSIDE_MLP = ("activation input", "activated half", "linear half", "activation output")
_WIDE = "norm input in fp32"
# What a codec leaves as it is, and what it keeps in 8 bits: the Notes in `saved/encoded.py`.
_EXACT = (LOG_SUM_EXP, "dropout mask", "mask of probabilities", "rotation", "logits")
_SUMS = ("norm input", _WIDE, "rotated queries", "rotated keys")


class Saved(NamedTuple):
    """A storage that a layer saves for backward.

    Attributes:
        replay_bytes: that replay reads and writes to compute it again; 0: it is not replayed.
        only_for_replay: it is saved only so that others can be replayed.
    """

    name: str
    num_bytes: int
    replay_bytes: int = 0
    only_for_replay: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether no codec encodes it: masks, tables, statistics and logits."""
        return self.name in _EXACT

    @property
    def is_sum(self) -> bool:
        """Whether it is kept in 8 bits also where others are in 4."""
        return self.name in _SUMS

    @property
    def is_fp32(self) -> bool:
        """Whether its numbers are wider than the model's."""
        return self.name == _WIDE


@dataclass(frozen=True)
class Work:
    """What a forward pass through something computes, and what of it is saved.

    Attributes:
        made: storages that are saved with replay or without, in the order in which they are made.
        matmul_flops: in matrix products with weights.
        attention_flops: in products of queries, keys and values.
        attention_backward: those of backward, as a multiple.
        repeated_flops: in attention, once more in backward (selective recomputation).
        memory_bytes: read and written by everything else.
        selective: of the saved, those that the activation function gives.
        selective_memory_bytes: that it reads and writes.
        runs_again: all of it runs once more in backward.
        sent_bytes: by tensor parallelism's collectives, through this GPU's links.
    """

    name: str
    made: tuple[Saved, ...]
    matmul_flops: float
    memory_bytes: float
    sent_bytes: float = 0.0
    attention_flops: float = 0.0
    attention_backward: float = FLASH_BACKWARD
    repeated_flops: float = 0.0
    selective: tuple[str, ...] = ()
    selective_memory_bytes: float = 0.0
    runs_again: bool = False

    @property
    def saved(self) -> tuple[Saved, ...]:
        """What it saves without replay."""
        return tuple(one for one in self.made if not one.only_for_replay)

    def replayed(self, min_bytes: int) -> tuple[Saved, ...]:
        """Of that, what replay computes again: no smaller storages."""
        return tuple(one for one in self.saved if one.replay_bytes and one.num_bytes >= min_bytes)

    def saved_with_replay(self, min_bytes: int) -> tuple[Saved, ...]:
        """What it saves with replay."""
        replayed = self.replayed(min_bytes)
        return tuple(
            one
            for one in self.made
            if one not in replayed and (replayed or not one.only_for_replay)
        )


def layer_work(
    model: Transformer, parallel: Parallelism, *, experts: Experts | None = None
) -> tuple[Work, Work]:
    """Attention and MLP, each with the norm before it and the residual sum after it.

    Args:
        experts: of the layer, in the place of its MLP.
    """
    sizes = _Sizes(model, parallel)
    if experts is not None:
        return _attention(model, sizes), _experts(model, experts, sizes)
    return _attention(model, sizes), _mlp(model, sizes)


def layer_input_bytes(model: Transformer, parallel: Parallelism) -> int:
    """What a layer keeps when it is recomputed as a whole."""
    return _Sizes(model, parallel).whole


def head_work(model: Transformer, parallel: Parallelism) -> Work:
    """Final norm, logits and loss, with logits in fp32 (section 4.3 of the paper above)."""
    sizes = _Sizes(model, parallel)
    logits = sizes.tokens * model.vocab_size / parallel.tensor
    kept = [] if model.chunked_loss else [Saved("logits", logits_bytes(model, parallel))]
    return Work(
        "head",
        (*_norm(model, sizes), *kept),
        matmul_flops=2 * logits * model.hidden_size,
        memory_bytes=2 * sizes.whole + 6 * 4 * logits,
        sent_bytes=sizes.collective,
        runs_again=model.chunked_loss,
    )


def logits_bytes(model: Transformer, parallel: Parallelism) -> int:
    """Of all tokens, or of one chunk's."""
    tokens = model.seq_length * parallel.micro_batch_size
    if model.chunked_loss:
        words = model.vocab_size // parallel.tensor
        tokens = min(tokens, chunk_tokens_for(tokens, model.hidden_size, words, "cuda"))
    return 4 * tokens * model.vocab_size // parallel.tensor


def inside_mlp_bytes(model: Transformer, parallel: Parallelism) -> int:
    """What the backward pass of an MLP works in: gradients, and of a tile what it makes again."""
    whole = replace(model, tiled_mlp=False)
    if model.experts is not None:
        of_experts = _experts(model, model.experts, _Sizes(model, parallel)).made
        return sum(
            one.num_bytes for one in of_experts if one.name in ("activation input", INSIDE_MLP[-1])
        )
    sizes = {one.name: one.num_bytes for one in _mlp(whole, _Sizes(model, parallel)).made}
    halves = sizes["activation input"] + model.eager * sizes.get("linear half", 0)
    gradients = halves + sizes["activation output"]
    if not model.tiled_mlp:
        return gradients
    tokens = model.seq_length * parallel.micro_batch_size
    tile = min(tile_tokens_of(model.hidden_size), tokens)
    made = sum(sizes.get(name, 0) for name in INSIDE_MLP)
    weights = (3 if model.gated else 2) * model.hidden_size * model.ffn_size // parallel.tensor
    return (gradients + made) * tile // tokens + 4 * weights  # and sums of their gradients, in fp32


def embedding_work(model: Transformer, parallel: Parallelism) -> Work:
    """Rows of the table, and dropout."""
    sizes = _Sizes(model, parallel)
    saved = (Saved("dropout mask", sizes.mask),) if sizes.mask else ()
    return Work("embedding", saved, 0.0, 3 * sizes.whole, sizes.collective)


class _Sizes:
    """Bytes of tensors that occur several times."""

    def __init__(self, model: Transformer, parallel: Parallelism) -> None:
        self.tensor, self.expert = parallel.tensor, parallel.expert
        self.divisor = parallel.tensor if parallel.sequence_parallel else 1
        self.element = model.element_bytes
        self.tokens = model.seq_length * parallel.micro_batch_size
        # Hidden states: whole on each rank, or divided along the sequence.
        states = self.tokens * model.hidden_size // self.divisor
        self.whole = states * self.element
        mask = 1 if model.fused_kernels else self.element
        self.mask = states * mask if model.hidden_dropout else 0
        # A ring's all-reduce sends this much; all-gather and reduce-scatter together as well.
        share = (parallel.tensor - 1) / parallel.tensor
        self.collective = 2 * share * self.tokens * model.hidden_size * self.element

    def divided(self, width: int) -> int:
        """A tensor with `width` elements a token over all tensor-parallel ranks."""
        return self.tokens * width * self.element // self.tensor


def _norm(model: Transformer, sizes: _Sizes) -> list[Saved]:
    whole = sizes.whole
    output = Saved("norm output", whole, 2 * whole)
    if model.eager and model.rms_norm:
        wide = whole * 4 // sizes.element  # it computes in fp32
        is_cast = wide > whole
        copy = whole + wide if is_cast else 0
        return [
            Saved("norm input", whole, only_for_replay=is_cast),
            *([Saved(_WIDE, wide, copy)] if is_cast else []),
            Saved("normalized", whole, 2 * wide + copy),
            output,
        ]
    saved = [Saved("norm input", whole)]
    if not model.fused_kernels and model.rms_norm:
        saved.append(Saved("normalized", whole, 2 * whole))  # before the weight
    return [*saved, output]


def _norm_bytes(model: Transformer, sizes: _Sizes) -> int:
    """Read and written by a norm: a cast, a square, its mean, two products and a cast."""
    if not (model.eager and model.rms_norm):
        return 2 * sizes.whole
    wide = sizes.whole * 4 // sizes.element
    casts = 2 * (sizes.whole + wide) if wide > sizes.whole else 0
    return casts + 2 * wide + wide + 2 * wide + 2 * sizes.whole


def _dropout(sizes: _Sizes) -> list[Saved]:
    return [Saved("dropout mask", sizes.mask)] if sizes.mask else []


def _attention(model: Transformer, sizes: _Sizes) -> Work:
    query, key = model.query_size, model.key_size
    saved = _norm(model, sizes)
    if not model.eager:
        saved.append(Saved("queries, keys, values", sizes.divided(query + 2 * key)))
    elif not model.rope:
        saved += [Saved("queries", sizes.divided(query)), Saved("keys", sizes.divided(key))]
    if model.rope:
        saved.append(Saved("rotated queries", sizes.divided(query)))
        saved.append(Saved("rotated keys", sizes.divided(key)))
        if not model.fused_kernels and not model.eager:  # there layers share them
            table = model.seq_length * model.head_size * sizes.element
            saved.extend([Saved("rotation", table)] * 4)  # cosine and sine, for each of the two
    if model.eager:
        saved.append(Saved("values", sizes.divided(key)))
    scores, memory = _scores(model, sizes)
    saved.extend(scores)
    saved.append(Saved("attention output", sizes.divided(query)))
    if model.flash_attention:
        heads = model.num_attention_heads // sizes.tensor or 1
        saved.append(Saved(LOG_SUM_EXP, heads * sizes.tokens * 4))
    saved.extend(_dropout(sizes))
    # Flash attention skips what a causal mask hides; products of whole matrices do not.
    seen = 0.5 if model.flash_attention else 1.0
    products = 4 * sizes.tokens * model.seq_length * query * seen / sizes.tensor
    # Eager: two products, a turned copy and a sum.
    rotation = (9 if model.eager else 2) * sizes.divided(query + key) if model.rope else 0
    memory += 3 * sizes.whole + _norm_bytes(model, sizes) + rotation
    repeats = model.selective_recompute and not model.flash_attention
    return Work(
        "attention",
        tuple(saved),
        matmul_flops=2 * sizes.tokens * model.hidden_size * (2 * query + 2 * key) / sizes.tensor,
        memory_bytes=memory,
        sent_bytes=sizes.collective,
        attention_flops=products,
        attention_backward=FLASH_BACKWARD if model.flash_attention else SCORES_BACKWARD,
        repeated_flops=products if repeats else 0.0,
    )


def _scores(model: Transformer, sizes: _Sizes) -> tuple[list[Saved], float]:
    """Tensors of (sequence x sequence) that are saved, and bytes read and written for them."""
    if model.flash_attention:
        return [], 0.0
    number = model.num_attention_heads * sizes.tokens * model.seq_length // sizes.tensor
    probabilities = number * sizes.element
    saved = [Saved("probabilities", probabilities)]
    if model.attention_dropout:
        saved.append(Saved("mask of probabilities", number * (1 if model.fused_kernels else 4)))
        saved.append(Saved("probabilities after dropout", probabilities))
    memory = (6.0 if model.attention_dropout else 4.0) * probabilities
    return ([] if model.selective_recompute else saved), memory


def _mlp(model: Transformer, sizes: _Sizes) -> Work:
    halves = 2 if model.gated else 1
    inside = sizes.divided(model.ffn_size)
    saved = _norm(model, sizes)
    outside = [*saved, *_dropout(sizes)]
    in_halves = model.gated and (model.eager or not model.fused_kernels)
    if in_halves and model.eager:
        saved += [Saved("activation input", inside), Saved("linear half", inside)]
    else:
        saved.append(Saved("activation input", halves * inside))
    if in_halves:
        saved.append(Saved("activated half", inside, 2 * inside))
        if not model.eager:
            saved.append(Saved("linear half", inside))
    passes = (2 if in_halves else halves) + 1
    saved.append(Saved("activation output", inside, passes * inside))
    saved.extend(_dropout(sizes))
    return Work(
        "mlp",
        tuple(outside if model.tiled_mlp else saved),
        matmul_flops=2.0
        * sizes.tokens
        * model.hidden_size
        * (1 + halves)
        * model.ffn_size
        / sizes.tensor,
        memory_bytes=3 * sizes.whole
        + _norm_bytes(model, sizes)
        + (passes + 2 * in_halves) * inside,
        sent_bytes=sizes.collective,
        selective=("activated half", "activation output") if model.eager else INSIDE_MLP[1:],
        selective_memory_bytes=(halves + 1) * inside,
        runs_again=model.tiled_mlp,
    )


def _experts(model: Transformer, experts: Experts, sizes: _Sizes) -> Work:
    """The router and a rank's share of the experts; see Note [Experts]."""
    halves = 2 if model.gated else 1
    routed = experts.topk * sizes.tokens  # of all tensor-parallel ranks, which hold them all
    sent = routed * model.hidden_size * sizes.element
    inside = sizes.divided(experts.topk * model.expert_size)
    shared = sizes.divided(experts.shared_size)
    scores = 4 * experts.number * sizes.tokens // sizes.divisor
    saved = [
        *_norm(model, sizes),
        Saved("router scores", scores),
        Saved("tokens of experts", sent),
        Saved("activation input", halves * inside),
    ]
    if not model.fused_kernels:
        of_gates = ("activated half", "linear half") if model.gated else ()
        saved += [Saved(name, inside) for name in (*of_gates, "unweighted output")]
    saved.append(Saved("activation output", inside))
    if shared:
        saved += [Saved("shared input", halves * shared), Saved("shared output", shared)]
    products = experts.topk * model.expert_size + experts.shared_size
    router = 2.0 * sizes.tokens * model.hidden_size * experts.number / sizes.divisor
    exchanged = 2 * sent / sizes.divisor * (sizes.expert - 1) / sizes.expert
    return Work(
        "mlp",
        (*saved, *_dropout(sizes)),
        matmul_flops=2.0 * sizes.tokens * model.hidden_size * (1 + halves) * products / sizes.tensor
        + router,
        # Tokens are put in the order of experts and back, each read and written.
        memory_bytes=3 * sizes.whole
        + _norm_bytes(model, sizes)
        + 4 * sent / sizes.divisor
        + (halves + 1) * (inside + shared),
        sent_bytes=experts.topk * sizes.collective + exchanged,
    )
