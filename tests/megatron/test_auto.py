# SPDX-License-Identifier: Apache-2.0
"""`--activation-offload auto` on megatron-core: measures, plans and follows, and changes no bit.

A plan that differs between ranks that share layers would end these runs with an error, or for ever.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import load_plans, save_plans
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.solver.solve import solve
from tests.support import launch
from tests.support.launch import TINY, Outcome, assert_same_bits, run_trainer, train, train_once
from tests.support.offload_flags import auto

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
LAYOUTS = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


@pytest.mark.slow
@pytest.mark.parametrize("position", [pytest.param("TP2", marks=pytest.mark.rare), "PP2"])
def test_auto_changes_no_bit(position: str, tmp_path: Path) -> None:
    world_size, flags = LAYOUTS[position]
    flags += f" --train-iters {STEPS}"
    run, path = tmp_path / "run", tmp_path / "plan.json"
    planned = train(
        flags,
        auto(tmp_path, "--activation-offload-max-slowdown 1", f"--activation-offload-plan {path}"),
        f"--metrics-file {run / 'metrics.jsonl'}",
        world_size=world_size,
        timeout_s=150,
    )
    assert_same_bits(planned, train_once(flags, world_size=world_size), STEPS)
    plans = load_plans(path)
    stages = 2 if "PP" in position else 1
    assert sorted(plans) == list(range(stages))
    layers = {one.layer for plan in plans.values() for one in plan.parts}
    assert layers == {f"decoder.{number}" for number in range(1, 5)}
    for stage in range(stages):
        profile = StageProfile.load(run / f"activation-profile-stage{stage}.json")
        assert profile.position.num_stages == stages and profile.num_micro_batches == 4
        for layer in profile.layers:
            assert [part.name for part in layer.parts] == ["attention", "mlp"]
            assert layer.movable_bytes > 0 and layer.forward_s > 0 and layer.backward_s > 0
            attention, mlp = layer.parts
            assert (
                attention.recompute_s
                and mlp.recompute_s
                and mlp.selective_s
                and attention.selective_s
            )
            # Four bytes, a sequence of 32; the norm's result and the activation function's. Replay
            # computes these again, and leaves nothing to selective recomputation.
            inside = 256 // (2 if "TP" in position else 1)
            assert attention.selective_bytes == mlp.selective_bytes == 0
            assert attention.replayed_bytes >= 4 * 32 * 64
            assert mlp.replayed_bytes >= 4 * 32 * (64 + inside)
            assert mlp.input_bytes == attention.input_bytes == layer.input_bytes == 4 * 32 * 64
    figures = [record["offload"] for record in planned.metrics]
    assert [step["plans"] > 0 for step in figures] == [False, False, True, True, True, True]
    for step in figures[2:]:
        assert step["predicted_step_s"] > 0 and step["measured_step_s"] > 0
        assert step["predicted_peak_bytes"] > 0
    assert planned.output.count("activation plan of stage 0") >= 1


@pytest.mark.slow
def test_with_replay_selective_operations_spare_nothing_more(tmp_path: Path) -> None:
    """A norm's result and the activation function's are replayed: a plan takes them off once.

    So is the noise of the dropout behind each part, of its bits.
    """
    run = tmp_path / "run"
    planned = train(
        f"--train-iters {STEPS}",
        auto(tmp_path, "--activation-offload-max-slowdown 1", "--activation-replay on"),
        f"--metrics-file {run / 'metrics.jsonl'}",
        timeout_s=150,
    )
    assert_same_bits(planned, train_once(f"--train-iters {STEPS}"), STEPS)
    profile = StageProfile.load(run / "activation-profile-stage0.json")
    for layer in profile.layers:
        attention, mlp = layer.parts
        assert (attention.selective_bytes, mlp.selective_bytes) == (0, 0)
        assert attention.replayed_bytes == 4 * 32 * (64 + 64)
        assert mlp.replayed_bytes == 4 * 32 * (64 + 256 + 64)
        assert attention.replay_s > 0 and mlp.replay_s > 0


@pytest.mark.slow
def test_ranks_that_share_layers_follow_the_same_plans_whatever_each_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launch.SCRIPTS, "uneven", Path(__file__).parent / "uneven_ranks.py")
    world_size, flags = LAYOUTS["TP2"]
    flags += " --train-iters 8"
    run = tmp_path / "run"
    run.mkdir()
    planned = train(
        flags,
        auto(tmp_path, "--activation-offload-max-slowdown 1"),
        f"--metrics-file {run / 'metrics.jsonl'}",
        model="uneven",
        world_size=world_size,
        timeout_s=150,
    )
    # In the order of the run: the first plan, and the one after what rank 1 alone has noticed.
    followed = [
        [(run / f"plan{number}-rank{rank}.json").read_bytes() for number in (1, 2)]
        for rank in range(world_size)
    ]
    assert followed[0] == followed[1] and len(list(run.glob("plan*"))) == 4
    for number in (1, 2):
        profiles = [
            StageProfile.load(run / f"profile{number}-rank{rank}.json")
            for rank in range(world_size)
        ]
        alone = [solve(profile, max_slowdown=1.0).placements for profile in profiles]
        assert alone[0] != alone[1], "each for itself would have planned the same"
    assert_same_bits(planned, train_once(flags, world_size=world_size), 8)


@pytest.mark.slow
def test_a_disk_that_becomes_slow_in_mid_run_is_planned_for_within_five_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launch.SCRIPTS, "slow disk", ROOT / "tools/check/train_on_slow_disk.py")
    slow_after, num_steps = 12, 17  # the second plan, with which it has settled, is of step 11
    # Steps that are long enough for the rate of their writes to be judged, also on a fast machine.
    flags = f"--train-iters {num_steps} --global-batch-size 16"
    slowed = train(
        flags,
        auto(tmp_path, "--activation-offload-max-slowdown 1"),
        tiny=f"--rate 4MB/s --after {slow_after} -- {TINY}",
        model="slow disk",
        timeout_s=150,
    )
    plans = [record["offload"]["plans"] for record in slowed.metrics]
    assert plans[slow_after - 1] == 2 and plans[slow_after + 4] > 2
    assert_same_bits(slowed, train(flags), num_steps)


def mixed(stage: int, layers: range) -> Plan:
    """Something of everything: recomputed, on the SSD, in two parts, kept."""
    kinds = [("layer", Placement.RECOMPUTE), ("layer", Placement.SSD), ("", Placement.KEEP)]
    parts = []
    for number in layers:
        part, placement = kinds[(number - 1) % 3]
        name = f"decoder.{number}"
        if part:
            parts.append(PlannedPart(0, name, part, placement, 0))
        else:
            parts.append(PlannedPart(0, name, "attention", Placement.SSD, 0))
            parts.append(PlannedPart(0, name, "mlp", Placement.KEEP, 0))
    return Plan(tuple(parts), stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize("position", [pytest.param("TP2+SP", marks=pytest.mark.rare), "PP2"])
def test_a_plan_that_people_wrote_is_followed_from_the_first_step(
    position: str, tmp_path: Path
) -> None:
    world_size, flags = LAYOUTS[position]
    flags += f" --train-iters {STEPS}"
    path = tmp_path / "plan.json"
    plans = [mixed(0, range(1, 5))]
    if position == "PP2":
        plans = [mixed(0, range(1, 3)), mixed(1, range(3, 5))]
    save_plans(path, plans)
    written = path.read_text()
    planned = train(
        flags, auto(tmp_path, f"--activation-offload-plan {path}"), world_size=world_size
    )
    assert_same_bits(planned, train_once(flags, world_size=world_size), STEPS)
    for record in planned.metrics:
        step = record["offload"]
        # Of stage 0: layers 1 and 4 (1 with two stages), for each of four micro-batches.
        assert step["recomputed_layers"] == (4 if position == "PP2" else 8)
        assert step["offloaded_bytes"] > 0 and step["plans"] == 1
    assert path.read_text() == written


def from_inputs(block: str, layers: range) -> list[PlannedPart]:
    """A layer, its attention and its MLP are recomputed, from inputs on the SSD; the rest stays."""
    again, keep, ssd = Placement.RECOMPUTE, Placement.KEEP, Placement.SSD
    kinds = [
        [("layer", again, ssd)],
        [("attention", again, ssd), ("mlp", keep, keep)],
        [("attention", keep, keep), ("mlp", again, ssd)],
        [("layer", again, keep)],
    ]
    return [
        PlannedPart(0, f"{block}.{number}", part, placement, 0, "", start)
        for number in layers
        for part, placement, start in kinds[(number - 1) % 4]
    ]


@pytest.mark.slow
def test_inputs_of_what_a_plan_recomputes_wait_on_the_ssd(tmp_path: Path) -> None:
    world_size, flags = LAYOUTS["TP2+SP"]
    flags += f" --train-iters {STEPS}"
    path = tmp_path / "plan.json"
    save_plans(path, [Plan(tuple(from_inputs("decoder", range(1, 5))))])
    planned = train(
        flags, auto(tmp_path, f"--activation-offload-plan {path}"), world_size=world_size
    )
    assert_same_bits(planned, train_once(flags, world_size=world_size), STEPS)
    for record in planned.metrics:
        step = record["offload"]
        assert (step["recomputed_layers"], step["recomputed_parts"]) == (4 * 2, 4 * 2)
        # Of four micro-batches three inputs each, of 16 tokens on each rank, and nothing else.
        assert (step["offloaded_storages"], step["offloaded_bytes"]) == (12, 12 * 16 * 64 * 4)


@pytest.fixture(scope="module")
def t5_alone(tiny: dict[str, str]) -> Outcome:
    """Steps of a T5 without offload, with which others are compared."""
    return train(f"--train-iters {STEPS}", tiny=tiny["t5"], model="t5")


@pytest.mark.slow
def test_encoder_and_decoder_may_be_recomputed_from_inputs_on_the_ssd(
    tiny: dict[str, str], t5_alone: Outcome, tmp_path: Path
) -> None:
    flags, path = f"--train-iters {STEPS}", tmp_path / "plan.json"
    both = [*from_inputs("encoder", range(1, 3)), *from_inputs("decoder", range(1, 3))]
    save_plans(path, [Plan(tuple(both))])
    planned = train(
        flags,
        auto(tmp_path, f"--activation-offload-plan {path}"),
        tiny=tiny["t5"],
        model="t5",
        timeout_s=150,
    )
    assert_same_bits(planned, t5_alone, STEPS)
    for record in planned.metrics:
        # Of each micro-batch four inputs, and once the encoder's output.
        assert record["offload"]["offloaded_storages"] == 5 * 2


@pytest.mark.slow
@pytest.mark.parametrize("position", [pytest.param("TP2", marks=pytest.mark.rare), "PP2"])
def test_a_budget_that_cannot_be_met_ends_all_ranks_with_one_sentence(
    position: str, tmp_path: Path
) -> None:
    world_size, flags = LAYOUTS[position]
    outcome = run_trainer(
        TINY,
        flags,
        auto(tmp_path, "--activation-memory-budget 1KiB"),
        f"--train-iters {STEPS}",
        world_size=world_size,
        timeout_s=150,
    )
    # Rank 0 leaves first; a launcher may kill the other before it has gone.
    assert outcome.exit_codes[0] == 2 and 0 not in outcome.exit_codes
    error = [line for line in outcome.errors.splitlines() if "error:" in line]
    assert len(error) == 1 and "budget" in error[0]
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(mixed(0, range(1, 7)).parts), "the plan has layer decoder.5 in chunk 0"),
        (Plan(mixed(0, range(1, 5)).parts, stage=1), "has stages 1, and none numbered 0"),
    ],
)
def test_a_plan_of_another_model_is_refused(plan: Plan, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plans(path, [plan])
    outcome = run_trainer(TINY, auto(tmp_path, f"--activation-offload-plan {path}"))
    assert outcome.exit_codes == [2] and outcome.metrics == []
    assert sentence in outcome.errors.splitlines()[-1]
    json.loads(path.read_text())


@pytest.mark.slow
def test_auto_plans_for_encoder_and_decoder_apart(
    tiny: dict[str, str], t5_alone: Outcome, tmp_path: Path
) -> None:
    flags, path = f"--train-iters {STEPS}", tmp_path / "plan.json"
    planned = train(
        flags,
        auto(tmp_path, "--activation-offload-max-slowdown 1", f"--activation-offload-plan {path}"),
        tiny=tiny["t5"],
        model="t5",
        timeout_s=150,
    )
    assert_same_bits(planned, t5_alone, STEPS)
    layers = [one.layer for one in load_plans(path)[0].parts]
    assert list(dict.fromkeys(layers)) == ["encoder.1", "encoder.2", "decoder.1", "decoder.2"]
