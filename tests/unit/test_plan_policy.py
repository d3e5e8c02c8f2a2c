# SPDX-License-Identifier: Apache-2.0
"""A policy that follows a plan, and offloads everything where there is none."""

from __future__ import annotations

from megatron.offload import Placement, Scope
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_policy import PlannedPolicy

PLAN = Plan(
    (
        PlannedPart(0, "decoder.1", "layer", Placement.RECOMPUTE, 8),
        PlannedPart(0, "decoder.2", "attention", Placement.HOST, 8),
        PlannedPart(0, "decoder.2", "mlp", Placement.KEEP, 8),
        PlannedPart(1, "decoder.3", "layer", Placement.KEEP, 8),
    )
)


def place(policy: PlannedPolicy, layer: str, part: str, *, chunk: int = 0) -> Placement:
    return policy.place(Scope(chunk, 0, layer, part), 100)


def test_without_a_plan_everything_of_some_size_goes() -> None:
    policy = PlannedPolicy(100, Placement.TIERED)
    assert policy.divides_layers
    assert policy.place_layer(Scope(0, 0, "decoder.1")) is Placement.TIERED
    assert place(policy, "decoder.1", "mlp") is Placement.TIERED
    assert policy.place(Scope(0, 0, "decoder.1", "mlp"), 99) is Placement.KEEP


def test_each_group_goes_where_the_plan_says() -> None:
    policy = PlannedPolicy(1, Placement.SSD)
    policy.follow(PLAN)
    assert policy.place_layer(Scope(0, 0, "decoder.1")) is Placement.RECOMPUTE
    assert place(policy, "decoder.1", "") is Placement.KEEP  # it could not be recomputed
    assert place(policy, "decoder.1", "mlp") is Placement.KEEP
    assert place(policy, "decoder.2", "attention") is Placement.HOST
    assert place(policy, "decoder.2", "mlp") is Placement.KEEP
    assert place(policy, "decoder.3", "mlp", chunk=1) is Placement.KEEP


def test_a_part_may_be_recomputed_alone_and_keeps_what_that_starts_from() -> None:
    policy = PlannedPolicy(1, Placement.SSD)
    lines = (("attention", Placement.RECOMPUTE), ("mlp", Placement.HOST))
    policy.follow(Plan(tuple(PlannedPart(0, "decoder.1", *line, 8) for line in lines)))
    assert policy.place_layer(Scope(0, 0, "decoder.1")) is not Placement.RECOMPUTE
    assert policy.place_layer(Scope(0, 0, "decoder.1", "attention")) is Placement.RECOMPUTE
    assert policy.place_layer(Scope(0, 0, "decoder.1", "mlp")) is Placement.HOST
    assert place(policy, "decoder.1", "attention") is Placement.KEEP
    assert place(policy, "decoder.1", "mlp") is Placement.HOST


def test_what_the_plan_does_not_know_leaves_memory() -> None:
    policy = PlannedPolicy(1, Placement.SSD)
    policy.follow(PLAN)
    assert place(policy, "decoder.3", "mlp") is Placement.SSD  # of another chunk
    assert place(policy, "decoder.2", "") is Placement.SSD  # its middle was not found


def test_what_recomputation_starts_from_goes_where_the_plan_says() -> None:
    policy = PlannedPolicy(10, Placement.SSD)
    again, ssd, host = Placement.RECOMPUTE, Placement.SSD, Placement.HOST
    policy.follow(
        Plan(
            (
                PlannedPart(0, "decoder.1", "layer", again, 8, "", ssd),
                PlannedPart(0, "decoder.2", "attention", again, 8, "", host),
                PlannedPart(0, "decoder.2", "mlp", again, 8),
            )
        )
    )
    assert place(policy, "decoder.1", "") is ssd
    assert policy.place_layer(Scope(0, 0, "decoder.1")) is again
    assert policy.place(Scope(0, 0, "decoder.1"), 9) is Placement.KEEP
    assert place(policy, "decoder.1", "mlp") is Placement.KEEP  # it could not be recomputed
    assert place(policy, "decoder.2", "attention") is host
    assert place(policy, "decoder.2", "mlp") is Placement.KEEP


def test_a_scope_replays_unless_its_line_says_that_it_does_not() -> None:
    policy = PlannedPolicy(1, Placement.SSD)
    assert policy.replays(Scope(0, 0, "decoder.1", "mlp"))  # without a plan
    lines = [("decoder.1", "layer"), ("decoder.2", "attention"), ("decoder.2", "layer")]
    kept = [PlannedPart(0, *line, Placement.KEEP, 8, replays=False) for line in lines]
    policy.follow(Plan((*kept, PlannedPart(0, "decoder.2", "mlp", Placement.KEEP, 8))))
    for layer, part, replays in [
        ("decoder.1", "", False),
        ("decoder.1", "mlp", False),  # of the whole layer, which has one line
        ("decoder.2", "attention", False),
        ("decoder.2", "mlp", True),
        ("decoder.2", "", False),
        ("decoder.3", "mlp", True),
    ]:
        assert policy.replays(Scope(0, 3, layer, part)) is replays
        assert policy.replays(Scope(1, 3, layer, part))  # of another chunk
    policy.follow(PLAN)
    assert policy.replays(Scope(0, 0, "decoder.1"))
