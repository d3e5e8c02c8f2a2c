# SPDX-License-Identifier: Apache-2.0
"""Whether transfers can hide behind a GPU, before anything runs: `produced_check`.

By the GPU's data sheet and a well-known model; `plan` computes it for any model. The drives are as
fast as `directory.py` has measured them.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.offload.commands.doctor.check import Check, Status
from megatron.offload.commands.doctor.gpu import Gpu
from megatron.offload.planner.profile.produced import in_words, produced_bytes_per_s
from megatron.offload.planner.projection.hardware import DEFAULT_DRIVE, DriveSpec, GpuSpec, Hardware
from megatron.offload.planner.projection.model import Parallelism, Transformer
from megatron.offload.planner.projection.projection import Projection, project

_MODEL_NAME = "Llama-3-8B"
_MODEL = Transformer(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=4096,
    vocab_size=128256,
    num_query_groups=8,
    ffn_hidden_size=14336,
    gated=True,
    rope=True,
    rms_norm=True,
    tied_embeddings=False,
)


def produced_check(gpu: Gpu, checks: Iterable[Check]) -> Check | None:
    """What a layer makes a second in forward against the link and the drives.

    Args:
        gpu: of this machine.
        checks: of the directories; of each that was measured the best write speed counts.

    Returns:
        None: the GPU is not described, or does not compute in bf16.
    """
    described = GpuSpec.of_device(gpu.name, gpu.memory_bytes)
    if described is None or _MODEL.dtype not in described.flops:
        return None
    hardware = Hardware(described, DriveSpec.load(DEFAULT_DRIVE), num_drives=0)
    layers = project(Projection(_MODEL, Parallelism(), hardware)).layers
    made = produced_bytes_per_s(layers)
    taken = {f"the link ({described.host_link})": hardware.link_bytes_per_s}
    rates = [one.facts.get("write_bytes_per_s") for one in checks]
    written = [max(one.values()) for one in rates if one]
    if written:
        taken["what the directories write"] = sum(written)
    hides = max(taken.values()) >= made
    return Check(
        "activations",
        Status.INFO,
        f"a layer of {_MODEL_NAME} makes {in_words(made, taken)}, by data sheet",
        ""
        if hides
        else "what does not hide has to be kept, recomputed or waited for: "
        "--activation-offload auto decides layer by layer, megatron-offload plan computes it for "
        "your model",
        {"produced_bytes_per_s": made, "taken_bytes_per_s": taken},
    )
