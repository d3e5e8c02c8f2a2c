# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama whose sequences are divided among ranks by DeepSpeed's Ulysses.

test_sequence_parallel.py starts it on each rank. Prints, for each setting: whether all ranks have
the same bits with and without the door, the bytes that moved or were computed again in a step, how
many attentions saw whole sequences, and how far the loss is from that of one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.integrations.deepspeed_ranks import end, from_all, join, place_of
from tests.support.same_training import Batch, train
from tests.support.text_models import TOKENS, llama, text_batches

SETTINGS: dict[str, dict[str, Any]] = {
    "ssd": {},
    "host": {"mode": "host", "host_budget": "64MiB"},
    "no replay": {"replay": "off"},
    "recomputed": {"recompute_layers": "all", "recompute_input": "ssd"},
}


def whole_batches() -> list[Batch]:
    """The same on each rank, one sequence a batch; what follows a token is its label."""
    batches = []
    for batch in text_batches():
        tokens = batch["input_ids"][:1]
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        positions = torch.arange(TOKENS).unsqueeze(0)
        batches.append({"input_ids": tokens, "shift_labels": labels, "position_ids": positions})
    return batches


def share_of(batch: Batch) -> Batch:
    """This rank's tokens."""
    return {n: one.chunk(dist.get_world_size(), 1)[dist.get_rank()] for n, one in batch.items()}


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over all tokens of all ranks, of which this rank has a share."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    labels = batch["shift_labels"].flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    return loss / (TOKENS - 1)


def main(folder: Path) -> None:
    join()
    batches = whole_batches()
    torch.manual_seed(5)
    with torch.no_grad():
        of_one = loss_of(llama(), batches[0])
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    lengths = []

    def seen(module: torch.nn.Module, query: torch.Tensor, *args: Any, **options: Any) -> Any:
        lengths.append(query.shape[2])
        return own(module, query, *args, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = seen
    UlyssesSPAttentionHF.register_with_transformers(
        llama(),
        "sdpa",
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=1,
    )
    torch.manual_seed(5)
    with torch.no_grad():
        together = loss_of(llama(), share_of(batches[0]))
    dist.all_reduce(together)
    found: dict[str, Any] = {"loss": [float(of_one), float(together)]}
    shares = [share_of(batch) for batch in batches]
    alone = train(llama, shares, call=loss_of)
    for name, settings in SETTINGS.items():
        offloaded = train(llama, shares, place_of(folder, name), call=loss_of, **settings)
        same = all(
            getattr(alone, of) == getattr(offloaded, of)
            for of in ("losses", "gradients", "weights")
        )
        moved = [
            int(one["offloaded_bytes"] + one["replayed_bytes"]) for one in offloaded.statistics
        ]
        found[name] = {"identical": from_all(same), "bytes": moved, "left": offloaded.left_bytes}
    found["lengths"] = sorted(set(lengths))
    end(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
