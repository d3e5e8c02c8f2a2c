# SPDX-License-Identifier: Apache-2.0
"""BERT and T5 with their activations on the SSD: the same bits, nothing moves twice, every layout
computes what one rank computes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from trainer.arguments import parse_arguments
from trainer.t5 import T5

from tests.support.launch import Outcome, assert_same_bits, run_trainer, train
from tests.support.offload_flags import ssd

pytestmark = pytest.mark.slow

MODELS = ("bert", "t5")
DP2 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# The vocabulary is padded to a multiple of this times the tensor-parallel size: everywhere to 512.
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 256"
TP2_SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
PP2_VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
EVALUATION = "--eval-interval 3 --eval-iters 2"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3"


def assert_moved(outcome: Outcome, directory: Path) -> None:
    """Activations left memory, came back, and left nothing behind."""
    moved = outcome.values("offload")
    assert min(step["offloaded_bytes"] for step in moved) > 0
    assert sum(step["read_bytes"] for step in moved) > 0
    assert min(step["tier_used_bytes"] for step in moved) == 0
    assert os.listdir(directory) == []


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("bert", f"{TP2_SP} --bf16"),
        ("bert", PP2_VPP2),
        ("bert", DP2),
        ("t5", TP2_SP),
        ("t5", f"{DP2} --bf16"),
    ],
    ids=["BERT-TP2+SP", "BERT-PP2xVPP2", "BERT-DP2", "T5-TP2+SP", "T5-DP2"],
)
def test_offload_changes_no_bit(
    model: str, layout: str, tiny: dict[str, str], tmp_path: Path
) -> None:
    """Dropout is on, as it is by default."""
    flags = f"{layout} --train-iters 2"
    off = train(flags, tiny=tiny[model], model=model, world_size=2)
    offloaded = train(flags, ssd(tmp_path), tiny=tiny[model], model=model, world_size=2)
    assert_same_bits(offloaded, off, 2)
    assert_moved(offloaded, tmp_path)


@dataclass(frozen=True)
class Saved:
    """A run with offload, and the checkpoint after its last step."""

    checkpoint: Path
    outcome: Outcome


@pytest.fixture(scope="module")
def saved(tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Three steps of each model."""
    runs = {}
    for model in MODELS:
        checkpoint, directory = (tmp_path_factory.mktemp(model) for _ in range(2))
        flags = f"--train-iters 3 --lr-decay-iters 6 --save {checkpoint}"
        outcome = train(flags, EVALUATION, ssd(directory), tiny=tiny[model], model=model)
        assert_moved(outcome, directory)
        runs[model] = Saved(checkpoint, outcome)
    return runs


@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_and_evaluated_run_with_offload_equals_one_without(
    model: str, tiny: dict[str, str], saved: dict[str, Saved], tmp_path: Path
) -> None:
    whole = train("--train-iters 6", EVALUATION, tiny=tiny[model], model=model)
    first = saved[model].outcome
    flags = f"--train-iters 6 --load {saved[model].checkpoint}"
    resumed = train(flags, EVALUATION, ssd(tmp_path), tiny=tiny[model], model=model)
    for name in ("step", "loss", "grad_norm"):
        assert first.values(name) + resumed.values(name) == whole.values(name), name
    assert resumed.model == whole.model
    assert validations(first) + validations(resumed) == validations(whole)
    assert len(validations(whole)) == 2
    assert whole.values("loss")[-1] < whole.values("loss")[0]
    assert_moved(resumed, tmp_path)


def validations(outcome: Outcome) -> list[str]:
    """The lines of the output that report a validation loss."""
    return [line for line in outcome.output.splitlines() if line.startswith("validation at")]


# ------------------------------------------------------------------ nothing moves twice


ADDED_TOKENS, MICRO_BATCH = 64, 2


@pytest.fixture(scope="module")
def steps_of_t5(
    tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, int], tuple[str, dict[str, int]]]:
    """By decoder layers and length of the encoder's text: flags, and what one step moved."""
    directory = tmp_path_factory.mktemp("offload")
    steps = {}
    for layers in (1, 3):
        for length in (64, 64 + ADDED_TOKENS):
            flags = (
                f"--train-iters 1 --decoder-num-layers {layers} --seq-length {length}"
                f" --decoder-seq-length 64 --micro-batch-size {MICRO_BATCH}"
                " --max-position-embeddings 128 --mask-prob 0.05"
            )
            off = "--activation-replay off"
            outcome = train(ssd(directory), off, flags, tiny=tiny["t5"], model="t5")
            steps[layers, length] = f"{tiny['t5']} {flags}", outcome.values("offload")[0]
    return steps


def test_the_encoder_output_that_every_decoder_layer_saves_moves_once(
    steps_of_t5: dict[tuple[int, int], tuple[str, dict[str, int]]],
) -> None:
    """What a longer encoder text adds to a step, per decoder layer, exactly.

    A decoder layer's own part is the projection of the encoder's output, one storage of keys and
    values. Saved besides are the other half of that storage and the encoder's output: duplicates.
    """
    hidden, element = 64, 4
    output_bytes = ADDED_TOKENS * hidden * MICRO_BATCH * element

    def added(name: str, layers: int) -> int:
        short, long = (steps_of_t5[layers, length][1] for length in (64, 64 + ADDED_TOKENS))
        return long[name] - short[name]

    for name, outputs in (("offloaded_bytes", 2), ("deduplicated_bytes", 1 + 2)):
        assert added(name, layers=3) - added(name, layers=1) == 2 * outputs * output_bytes, name
    assert all(moved["rejected_bytes"] == 0 for _, moved in steps_of_t5.values())


def test_what_t5_reserves_is_little_more_than_it_moves(
    steps_of_t5: dict[tuple[int, int], tuple[str, dict[str, int]]],
) -> None:
    task = T5()
    for flags, moved in steps_of_t5.values():
        args = parse_arguments("", flags.split(), (task.add_arguments,))
        task.check_arguments(args)
        reserved = task.activation_bytes(args, task.transformer_config(args), 0)
        assert moved["offloaded_bytes"] <= reserved <= 1.3 * moved["offloaded_bytes"]


# ------------------------------------------------------------------ layouts

# Layouts sum in other orders, in fp32: see `test_trainer_layouts.py`.
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def references(tiny: dict[str, str], saved: dict[str, Saved]) -> dict[str, Outcome]:
    """Two more steps of each model on one rank, without dropout."""
    return {
        model: train(
            NO_DROPOUT,
            f"--load {saved[model].checkpoint} --train-iters 5",
            tiny=tiny[model],
            model=model,
        )
        for model in MODELS
    }


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("bert", TP2),
        ("bert", TP2_SP),
        ("bert", PP2),
        ("bert", PP2_VPP2),
        ("t5", TP2),
        ("t5", TP2_SP),
    ],
    ids=["BERT-TP2", "BERT-TP2+SP", "BERT-PP2", "BERT-PP2xVPP2", "T5-TP2", "T5-TP2+SP"],
)
def test_layout_agrees_with_one_rank(
    model: str,
    layout: str,
    tiny: dict[str, str],
    saved: dict[str, Saved],
    references: dict[str, Outcome],
    tmp_path: Path,
) -> None:
    outcome = train(
        NO_DROPOUT,
        ssd(tmp_path),
        f"{layout} --load {saved[model].checkpoint} --train-iters 5",
        tiny=tiny[model],
        model=model,
        world_size=2,
    )
    assert outcome.values("step") == [4, 5]
    for name in ("loss", "grad_norm"):
        expected = pytest.approx(references[model].values(name), rel=RELATIVE_TOLERANCE)
        assert outcome.values(name) == expected, name
    if model == "bert":
        for step, reference in zip(outcome.metrics, references[model].metrics, strict=True):
            parts = step["losses"]
            assert parts == pytest.approx(reference["losses"], rel=RELATIVE_TOLERANCE)
            assert sum(parts.values()) == pytest.approx(step["loss"], rel=RELATIVE_TOLERANCE)


def test_a_checkpoint_of_t5_moves_to_a_layout_that_pads_the_vocabulary_differently(
    tiny: dict[str, str], saved: dict[str, Saved]
) -> None:
    other = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 384"
    flags = f"{other} --load {saved['t5'].checkpoint} --train-iters 4"
    outcome = train(NO_DROPOUT, flags, tiny=tiny["t5"], model="t5", world_size=2)
    assert outcome.values("step") == [4]


def test_a_checkpoint_of_another_model_is_refused(
    tiny: dict[str, str], saved: dict[str, Saved]
) -> None:
    flags = f"--load {saved['bert'].checkpoint} --train-iters 4"
    outcome = run_trainer(tiny["t5"], flags, model="t5")
    assert outcome.exit_codes == [2]
    sentence = outcome.errors.splitlines()[-1]
    assert sentence.startswith("pretrain_t5.py: error: --load: ")
    assert "is of BERT, not of T5" in sentence
