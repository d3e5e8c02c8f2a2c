# SPDX-License-Identifier: Apache-2.0
"""The trainer's parts that can be wrong on their own: sample order, attention, metrics,
reserves."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from trainer import arguments, checkpointing, training
from trainer.attention import _DropoutAttention, _DropoutMask
from trainer.checkpointing import Progress
from trainer.data import SampleOrder
from trainer.gpt import GPT

from megatron.offload.integration.megatron import whole_training
from megatron.offload.integration.megatron.estimate import activation_bytes
from megatron.offload.stats.metrics_file import MetricsFile, StepRecord
from tests.support.launch import TINY


def order(first_sample: int, rank: int, num_ranks: int = 2, num_samples: int = 10) -> SampleOrder:
    return SampleOrder(num_samples, first_sample, 3, rank, num_ranks, seed=1)


def test_ranks_share_the_samples_of_a_step_in_order() -> None:
    assert next(iter(order(0, rank=0))) == [0, 1, 2]
    assert next(iter(order(0, rank=1))) == [3, 4, 5]


def test_sample_order_continues_where_a_run_stopped() -> None:
    for rank in range(2):
        whole = list(islice(order(0, rank), 12))
        resumed = list(islice(order(5 * 3 * 2, rank), 7))
        assert resumed == whole[5:]


def test_every_epoch_has_every_sample_once_in_another_order() -> None:
    batches = list(islice(order(0, rank=0, num_ranks=1), 10))
    samples = [sample for batch in batches for sample in batch]
    epochs = [samples[begin : begin + 10] for begin in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("query_heads", [4, 8])
def test_dropout_attention_equals_autograd_through_the_unfused_form(query_heads: int) -> None:
    """Against softmax, the same mask, and matmul in fp64: fp32 rounding is all that is left."""
    torch.manual_seed(0)
    groups, seq, width, probability, seed = 4, 24, 16, 0.25, 99
    shapes = ((2, groups, query_heads // groups, seq, width), (2, groups, 1, seq, width))
    query, key, value = (
        torch.randn(shapes[0 if i == 0 else 1], requires_grad=True) for i in range(3)
    )
    mask = torch.ones(seq, seq, dtype=torch.bool).triu_(1).view(1, 1, seq, seq)
    output = _DropoutAttention.apply(query, key, value, mask, 0.25, probability, seed)
    upstream = torch.randn_like(output)
    gradients = torch.autograd.grad(output, (query, key, value), upstream)

    inputs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    scores = (inputs[0] * 0.25) @ inputs[1].transpose(-1, -2)
    weights = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
    dropout = _DropoutMask(probability, seed)
    keep = torch.stack([dropout.draw(sample.shape) for sample in weights])
    expected = (weights * keep * dropout.scale) @ inputs[2]
    expected_gradients = torch.autograd.grad(expected, inputs, upstream.double())

    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=1e-5)


def test_dropout_attention_with_nothing_dropped_is_the_fused_kernel() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 1, 16, 8) for _ in range(3))
    mask = torch.ones(16, 16, dtype=torch.bool).triu_(1).view(1, 1, 16, 16)
    output = _DropoutAttention.apply(query, key, value, mask, 8**-0.5, 0.0, 1)
    fused = F.scaled_dot_product_attention(
        query.squeeze(2), key.squeeze(2), value.squeeze(2), is_causal=True
    )
    torch.testing.assert_close(output.squeeze(2), fused)


def test_dropout_attention_saves_nothing_of_sequence_by_sequence() -> None:
    saved: list[torch.Tensor] = []
    query, key, value = (torch.randn(1, 2, 1, 64, 4, requires_grad=True) for _ in range(3))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _DropoutAttention.apply(query, key, value, None, 0.5, 0.1, 3)
    assert len(saved) == 3
    assert max(tensor.numel() for tensor in saved) == query.numel()


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_mask_keeps_the_right_share(probability: float) -> None:
    num_elements = 1 << 20
    kept = int(_DropoutMask(probability, 1).draw(torch.Size((num_elements,))).sum())
    deviation = (num_elements * probability * (1 - probability)) ** 0.5
    assert abs(kept - num_elements * (1 - probability)) < 6 * deviation


def record(step: int) -> StepRecord:
    return StepRecord(step, 0.1 + 0.2, 1.0, 1.0, 1.0, 0, 0, 0, 1e-3)


def test_metrics_of_a_resumed_run_are_continued_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    first = MetricsFile(path, first_step=0)
    for step in (1, 2, 3):
        first.write(record(step))
    first.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # a run that was killed in the middle of a line
    resumed = MetricsFile(path, first_step=2)
    resumed.write(record(3))
    resumed.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["step"] for entry in records] == [1, 2, 3]
    assert records[0]["loss"] == 0.1 + 0.2


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "stages"),
    [(1, 1, 2, [0, 0]), (2, 0, 2, [1, 1]), (2, 0, 4, [1, 1])],  # the last is a launcher's silence
)
def test_each_rank_reserves_what_its_stage_needs(
    rank: int,
    local_rank: int,
    local_world_size: int,
    stages: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two machines of two ranks each; each machine's ranks are one stage."""
    checked = {}
    environment = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4}
    environment["LOCAL_WORLD_SIZE"] = local_world_size
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(whole_training, "check", lambda *args, **kwargs: checked.update(kwargs))
    flags = f"{TINY} --pipeline-model-parallel-size 2 --validate-only".split()
    training.pretrain(GPT(), flags)
    args = arguments.parse_arguments("", flags[:-1], (GPT().add_arguments,))
    settings = GPT().transformer_config(args)
    reserves = training._reserves(args, GPT(), settings)
    expected = [activation_bytes(settings, 32, 1, 2, stage) for stage in stages]
    assert reserves == expected
    assert checked["reserve_bytes"] == sum(expected) // 2
    first, last = (activation_bytes(settings, 32, 1, 2, stage) for stage in (0, 1))
    assert first == 2 * last


def test_the_disk_has_a_checkpoint_before_the_tracker_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure takes back what a resume would look for."""
    synced: list[int] = []
    at_names: list[tuple[str, list[int]]] = []
    replace = Path.replace

    def content(checkpoint: Path, *_: object) -> None:
        for name in ("metadata.json", "weights"):
            (checkpoint / name).write_text(name)

    def noting(self: Path, target: Path) -> Path:
        at_names.append((target.name, list(synced)))
        return replace(self, target)

    monkeypatch.setattr(checkpointing, "_save_content", content)
    monkeypatch.setattr(checkpointing, "dist", mock.Mock(get_rank=lambda: 0))
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    monkeypatch.setattr(Path, "replace", noting)
    saved = checkpointing.save_checkpoint(tmp_path, Progress(iteration=7), mock.MagicMock())
    ((tracker, before),) = at_names
    assert (tmp_path / tracker).read_text() == "7\n"
    assert {one.stat().st_ino for one in (*saved.iterdir(), saved)} <= set(before)
