# SPDX-License-Identifier: Apache-2.0
"""What forward makes a second, against what tiers take of it: `produced_bytes_per_s`, `in_words`.

The commands `plan` and `doctor` print it before anything runs. It does not depend on the batch:
bytes and seconds of a layer both grow with its tokens. `replay_in_words`: what forward makes and
nothing keeps; each plan says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron.offload.planner.profile.stage_profile import LayerProfile
from megatron.offload.sizes import format_size


def produced_bytes_per_s(layers: Iterable[LayerProfile]) -> float:
    """Bytes that tiers can take, by seconds of forward, of all layers together; 0: none."""
    saving = [layer for layer in layers if layer.movable_bytes]
    forward_s = sum(layer.forward_s for layer in saving)
    return sum(layer.movable_bytes for layer in saving) / forward_s if forward_s else 0.0


def in_words(bytes_per_s: float, taken_bytes_per_s: Mapping[str, float]) -> str:
    """Both, with the part of it that each tier takes.

    Args:
        bytes_per_s: that forward makes.
        taken_bytes_per_s: by the name of what takes them.
    """
    made = f"{bytes_per_s / 1e9:.1f} GB/s of activations in forward"
    if not bytes_per_s or not taken_bytes_per_s:
        return made
    parts = [
        f"{name} {rate / 1e9:.1f} ({min(rate / bytes_per_s, 1):.0%})"
        for name, rate in taken_bytes_per_s.items()
    ]
    return f"{made}; of that takes {', '.join(parts)}"


def replay_in_words(layers: Sequence[LayerProfile]) -> str:
    """What a layer's replay spares and takes, on average of those that replay; empty: none does."""
    replaying = [layer for layer in layers if layer.replayed_bytes]
    if not replaying:
        return ""
    number = len(replaying)
    spared = sum(p.spared_bytes for one in replaying for p in one.parts) // number
    kept = sum(p.movable_bytes + p.resident_bytes for one in replaying for p in one.parts) // number
    again_ms = 1000 * sum(layer.replay_s for layer in replaying) / number
    return (
        f"a layer that replays spares {format_size(spared)} and takes {again_ms:.3g} ms more; "
        f"{format_size(kept)} are kept or moved"
    )
