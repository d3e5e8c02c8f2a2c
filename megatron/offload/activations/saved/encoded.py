# SPDX-License-Identifier: Apache-2.0
"""Which saved tensors a codec keeps and moves in fewer bits, and how: `encoding_of`.

The hooks ask it about what no recipe computes again. A codec is a recipe too: what it made of the
tensor is saved in its place, and backward gets what it makes of that.

Note [The same whatever the timing]
What is encoded is always handed out decoded: also where the bytes that were saved are in memory
still, because a write is late or because others hold them. Else gradients would depend on a drive's
speed. So does what is computed again from it. Only a comparison sees the exact bytes, with which a
recipe is trusted or not: `AvailableTensors.hold` keeps them for as long as the layer runs.

Note [What stays exact]
Nothing of the forward pass changes, so losses are the same, bit for bit. Encoded is what an
operation with a gradient has made, in floating point. Inputs, masks, tables and statistics of norms
and of attention are not, and neither are log-probabilities: every gradient begins with them. Nor is
what is saved behind layers, by output layers and losses: a loss divides by probabilities or takes
their logarithm, and a small one beside a large one would be zero. It is little, and every gradient
flows through it. Roots and norms stay exact everywhere, for their gradients divide by them.

Note [Sums keep eight bits]
With int4, sums and embeddings are kept in 8 bits: the residual stream, of which norms compute a
variance, and queries and keys that were rotated, whose products are exponents. With these in 4 bits
too, a training ends further from the exact loss (tools/bench/codec_training.py measures it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.offload.activations.saved.autograd_graph import node_of
from megatron.offload.activations.saved.available import Held
from megatron.offload.activations.saved.quantization import INT4, INT8, TYPES, Quantization
from megatron.offload.activations.saved.recipe import Layout, Program, Recipe, Step
from megatron.offload.activations.saved.unreplayed import maker_of
from megatron.offload.activations.saved.view import SavedView

# Operations whose results stay as they are.
_EXACT = ("LogSoftmax", "Sqrt", "Norm", "LinalgVectorNorm")
_SUMS = ("Add", "Embedding")


class Codec(NamedTuple):
    """How values are kept and moved: see Note [Sums keep eight bits]."""

    sums: Quantization
    others: Quantization


CODECS = {"int8": Codec(INT8, INT8), "int4": Codec(INT8, INT4)}


def encoding_of(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    codec: Codec,
    save: Callable[[torch.Tensor], Held],
    *,
    is_behind: bool,
    rounds: bool | None = None,
) -> Recipe | None:
    """How the storage of a tensor is decoded; what is decoded is saved. None: it stays exact.

    Args:
        tensor: that autograd saves; its operation has ended.
        storage: its storage, which can move.
        codec: that makes it smaller.
        save: saves a tensor that autograd does not: what the codec made.
        is_behind: autograd saves it behind a layer, and before the next.
        rounds: whether the tensor may be rounded, to as many bits as sums; None: autograd knows
            the operation that made it, and that decides.
    """
    base = tensor._base
    target = tensor if base is None else base
    if target.dtype not in TYPES or target.nbytes != storage.nbytes():
        return None
    if rounds is None:
        quantization = None if is_behind else _chosen(target, codec)
    else:
        quantization = codec.sums if rounds else None
    num_values = target.numel()
    if quantization is None or quantization.encoded_bytes(num_values) >= target.nbytes:
        return None
    with torch.no_grad():
        values = torch.empty(0, dtype=target.dtype, device=target.device).set_(storage)
        codes = quantization.encode(values)
        held = save(codes)
    step = Step(quantization.decode, (~0,), (num_values, target.dtype))
    program = Program((step,), Layout((num_values,), (1,), target.dtype))
    bases = [held.saved] if isinstance(held, SavedView) else []
    return Recipe(program, [held], bases, 1, codes_bytes=codes.nbytes)


def _chosen(target: torch.Tensor, codec: Codec) -> Quantization | None:
    """How values are kept, by the operation that made them; None: exactly."""
    maker = maker_of(target)
    if node_of(target) is None or maker in _EXACT:
        return None
    return codec.sums if maker in _SUMS else codec.others
