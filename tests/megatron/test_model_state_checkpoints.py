# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the trainer with its optimizer's states on tiers: those of a run without."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.support import launch
from tests.support.launch import Outcome, train
from tests.support.ranks import run_ranks

SMALL = "--optimizer-state-window 64KiB --optimizer-state-bucket 16KiB"
LARGE = "--optimizer-state-window 8MiB --optimizer-state-bucket 2MiB"


def _on(directory: Path, sizes: str = SMALL) -> str:
    directory.mkdir(exist_ok=True)
    return f"--optimizer-state-offload ssd --optimizer-state-dir {directory} {sizes}"


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name."""
    reader = dcp.FileSystemReader(checkpoint)
    found = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in reader.read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def _assert_same(one: Path, other: Path) -> None:
    tensors, others = tensors_of(one), tensors_of(other)
    assert tensors.keys() == others.keys() and any("exp_avg_sq" in name for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def _assert_goes_on(resumed: Outcome, whole: Outcome) -> None:
    assert resumed.values("step") == [3, 4]
    for name in ("loss", "grad_norm"):
        assert resumed.values(name) == whole.values(name)[2:], name
    assert resumed.model == whole.model


DISTRIBUTED = "--use-distributed-optimizer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        pytest.param("", 1, id="fp32"),
        pytest.param("--bf16", 1, id="bf16", marks=pytest.mark.rare),
        pytest.param(f"{DISTRIBUTED} --bf16", 2, id="distributed-bf16"),
        pytest.param(DISTRIBUTED, 2, id="distributed", marks=pytest.mark.rare),
        pytest.param("--tensor-model-parallel-size 2 --bf16", 2, id="tp2", marks=pytest.mark.rare),
        pytest.param("--pipeline-model-parallel-size 2", 2, id="pp2", marks=pytest.mark.rare),
    ],
)
def test_checkpoints_and_what_comes_after_are_those_of_a_run_without(
    flags: str, world_size: int, tmp_path: Path
) -> None:
    """With offload, without, and each resumed in the middle by the other."""
    every = f"{flags} --train-iters 4 --save-interval 2"
    offload = _on(tmp_path / "tier")
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    whole = train(every, f"--save {plain}", world_size=world_size)
    train(every, f"--save {moved}", offload, world_size=world_size)
    for iteration in ("iter_0000002", "iter_0000004"):
        _assert_same(plain / iteration, moved / iteration)
    for directory, added in ((plain, offload), (moved, "")):
        (directory / "latest_checkpointed_iteration.txt").write_text("2\n")
        resumed = train(f"{flags} --train-iters 4 --load {directory}", added, world_size=world_size)
        _assert_goes_on(resumed, whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            f"{DISTRIBUTED} --bf16", "--tensor-model-parallel-size 2 --bf16 " + DISTRIBUTED
        ),
        pytest.param(DISTRIBUTED, "--pipeline-model-parallel-size 2 " + DISTRIBUTED),
        pytest.param("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
    ],
    ids=["dp2-to-tp2", "dp2-to-pp2", "tp2-to-pp2"],
)
@pytest.mark.rare
def test_another_layout_goes_on_as_it_does_without(before: str, after: str, tmp_path: Path) -> None:
    offload = _on(tmp_path / "tier")
    train(f"{before} --train-iters 2 --save {tmp_path}", offload, world_size=2)
    load = f"{after} --train-iters 4 --load {tmp_path}"
    plain = train(load, world_size=2)
    moved = train(load, offload, world_size=2)
    assert moved.values("loss") == plain.values("loss")
    assert moved.values("grad_norm") == plain.values("grad_norm")
    assert moved.model == plain.model


@pytest.mark.rare
def test_every_format_of_the_distributed_optimizer_goes_on_both_ways(tmp_path: Path) -> None:
    states = tmp_path / "states"
    states.mkdir()
    found = run_ranks(Path(__file__).parent / "state_checkpoints_ranks.py", tmp_path, str(states))
    assert len(found) == 4 and all(map(all, found.values())), found


@pytest.mark.rare
def test_checkpoints_need_no_second_copy_of_the_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a rank needs while it saves and loads, beside a run without offload."""
    script = Path(__file__).parent / "checkpoint_memory_ranks.py"
    monkeypatch.setitem(launch.SCRIPTS, "measured", script)
    large = f"{DISTRIBUTED} --bf16 --hidden-size 256 --num-layers 8 --vocab-size 8192"
    grown: dict[tuple[str, bool], int] = {}
    for moves in (False, True):
        where = _on(tmp_path / "tier", LARGE) if moves else ""
        checkpoint = tmp_path / str(moves)
        for steps, flag in ((2, "--save"), (3, "--load")):
            flags = f"{large} --train-iters {steps} {flag} {checkpoint}"
            ranks = functools.partial(train, world_size=2, fresh=True, timeout_s=200.0)
            output = ranks(flags, where, model="measured").output
            ((what, mib),) = re.findall(r"(save|load)_checkpoint (\d+) MiB", output)
            grown[what, moves] = int(mib)
    for what in ("save", "load"):
        assert grown[what, True] < grown[what, False] / 3, grown
