# SPDX-License-Identifier: Apache-2.0
"""A plan as a file, as a table and as a number that ranks compare."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.offload import ConfigurationError, Placement
from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.plan_file import (
    load_plans,
    plans_from_json,
    plans_to_json,
    save_plans,
)
from megatron.offload.activations.placement.plan_table import plan_table
from megatron.offload.activations.saved.scope import name_after

MIB = 1 << 20


def plan(stage: int = 0, num_layers: int = 4) -> Plan:
    """Attention to the SSD and the MLP kept, but for the last layer, which is recomputed."""
    parts = []
    for number in range(1, num_layers):
        parts += [
            PlannedPart(0, f"decoder.{number}", "attention", Placement.SSD, 3 * MIB, "hides"),
            PlannedPart(0, f"decoder.{number}", "mlp", Placement.KEEP, 5 * MIB, "room"),
        ]
    last = PlannedPart(0, f"decoder.{num_layers}", "layer", Placement.RECOMPUTE, 8 * MIB, "cheap")
    return Plan(
        parts=(*parts, last),
        goal="at most 12 GiB",
        predicted=Prediction(1.5, 0.25, 0.125, 12 * MIB, 9 * MIB, 7 * MIB),
        fastest=Prediction(1.0, 0.0, 0.0, 32 * MIB),
        stage=stage,
        notes=("read this",),
    )


def test_a_file_keeps_the_plans_of_all_stages(tmp_path: Path) -> None:
    plans = [plan(1), dataclasses.replace(plan(0), predicted=None, notes=())]
    save_plans(tmp_path / "new" / "plan.json", plans)
    assert load_plans(tmp_path / "new" / "plan.json") == {1: plans[0], 0: plans[1]}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plan.json"]


def test_a_file_has_a_line_for_each_part() -> None:
    lines = plans_to_json([plan(0), plan(1)]).splitlines()
    assert sum('"placement": "ssd"' in line for line in lines) == 6
    assert all(line.count('"placement"') <= 1 for line in lines)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "this is no activation plan"),
        ("[]", "this is no activation plan"),
        ('{"stages": []}', "this is no activation plan"),
        ('{"version": 2, "stages": []}', "format 2, this release reads 1"),
        ('{"version": 1, "stages": [{"parts": [{"layer": "a"}]}]}', "this is no activation plan"),
        (plans_to_json([plan()]).replace('"ssd"', '"dvd"'), "this is no activation plan"),
        (plans_to_json([plan()]).replace('"goal"', '"gaol"'), "this is no activation plan"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        plans_from_json(text)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_plans(tmp_path / "plan.json")


LAYERS = [(0, f"decoder.{number}") for number in range(1, 5)]


def test_a_plan_fits_the_layers_and_tiers_that_it_names() -> None:
    plan().check(LAYERS, [Placement.SSD])


def test_what_runs_between_layers_may_be_planned() -> None:
    extra = [
        PlannedPart(0, name_after(layer), "layer", Placement.SSD, 1) for layer in ("", "decoder.4")
    ]
    Plan((*plan().parts, *extra)).check(LAYERS, [Placement.SSD])


@pytest.mark.parametrize(
    ("layers", "tiers", "sentence"),
    [
        (LAYERS[:-1], [Placement.SSD], r"the plan has layer decoder\.4 in chunk 0 and the model"),
        ([*LAYERS, (1, "decoder.5")], [Placement.SSD], r"the model has layer decoder\.5 in chunk"),
        (LAYERS, [Placement.HOST], r"sends decoder\.1 to ssd.*give --activation-offload-dir"),
    ],
)
def test_a_plan_of_something_else_is_refused(
    layers: list[tuple[int, str]], tiers: list[Placement], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        plan().check(layers, tiers)


def test_a_part_that_there_is_not_is_refused() -> None:
    parts = (dataclasses.replace(plan().parts[0], part="mpl"), *plan().parts)
    with pytest.raises(ConfigurationError, match=r"a part 'mpl' of decoder\.1; expected one of"):
        Plan(parts).check(LAYERS, [Placement.SSD])


def test_a_part_that_is_recomputed_alone_survives_a_file(tmp_path: Path) -> None:
    parts = (
        PlannedPart(0, "decoder.1", "attention", Placement.RECOMPUTE, 3 * MIB, "no room"),
        PlannedPart(0, "decoder.1", "mlp", Placement.SSD, 5 * MIB),
    )
    save_plans(tmp_path / "plan.json", [Plan(parts)])
    read = load_plans(tmp_path / "plan.json")[0]
    assert read == Plan(parts) and read.placements[0, "decoder.1", "attention"] is (
        Placement.RECOMPUTE
    )
    read.check([(0, "decoder.1")], [Placement.SSD])
    assert plan_table(read).splitlines()[2] == ("  decoder.1  attention  3 MiB  recompute  no room")


def test_plans_share_a_number_if_they_place_alike() -> None:
    one, parts = plan(), plan().parts
    other_words = dataclasses.replace(one, goal="", parts=tuple(reversed(parts)))
    moved = dataclasses.replace(parts[0], placement=Placement.HOST)
    assert one.digest() == other_words.digest()
    assert one.digest() != dataclasses.replace(one, parts=(moved, *parts[1:])).digest()
    assert float(one.digest()) == one.digest() < 1 << 48


def test_the_table_joins_layers_that_look_alike() -> None:
    assert plan_table(plan()).splitlines() == [
        "activation plan of stage 0, at most 12 GiB:",
        "  layers       part       each   placement  why",
        "  decoder.1-3  attention  3 MiB  ssd        hides",
        "               mlp        5 MiB  keep       room",
        "  decoder.4    layer      8 MiB  recompute  cheap",
        "  together: ssd 3 parts, 9 MiB; keep 3 parts, 15 MiB; recompute 1 part, 8 MiB",
        "  predicted: 1.500 s a step, 0.250 s of them waiting, 0.125 s recomputing, at most 12 MiB "
        "of activations, 9 MiB written",
        "  everything kept: 1.000 s a step, at most 32 MiB of activations",
        "  note: read this",
    ]


def test_the_table_names_chunks_and_keeps_blocks_apart() -> None:
    parts = [
        PlannedPart(chunk, layer, "layer", Placement.KEEP, 8, "room")
        for chunk, layer in ((0, "encoder.1"), (0, "decoder.1"), (0, "decoder.2"), (1, "decoder.3"))
    ]
    lines = plan_table(Plan(tuple(parts))).splitlines()
    assert [line.split("  ")[1] for line in lines[2:-1]] == [
        "chunk 0 encoder.1", "chunk 0 decoder.1-2", "chunk 1 decoder.3",
    ]  # fmt: skip


def test_a_plan_that_was_edited_by_hand_is_read() -> None:
    values = json.loads(plans_to_json([plan()]))
    values["stages"][0]["parts"][0]["placement"] = "keep"
    edited = plans_from_json(json.dumps(values))[0]
    assert edited.parts[0].placement is Placement.KEEP and edited.parts[1:] == plan().parts[1:]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            '"chunk": 0',
            '"chunk": "0"',
            "Expected `int`, got `str` - at `$.stages[0].parts[1].chunk`",
        ),
        ('"chunk": 0', '"chunk": true', "got `bool` - at `$.stages[0].parts[1].chunk` in {"),
        ('"layer": "decoder.0"', '"layer": ["decoder.0"]', "$.stages[0].parts[1].layer"),
        ('"stage": 0', '"stage": [0]', "Expected `int`, got `array` - at `$.stages[0].stage`"),
        ('"movable_bytes": 8', '"movable_bytes": "8MiB"', '"mlp", "placement": "ssd", "movable_by'),
        ('"reason": ""', '"reason": null', "Expected `str`, got `null`"),
        ('"step_s": 1.0', '"step_s": "1"', "Expected `float`, got `str`"),
        (
            '"placement": "ssd"',
            '"placement": "sdd"',
            '"layer": "decoder.0", "part": "mlp"',
        ),
        ('"placement": "ssd"', '"placement": "sdd"', "expected keep, recompute, host or ssd"),
        ('"reason": ""', '"raeson": ""', "nothing is called 'raeson'"),
        ('"part": "mlp"', '"part": "attention"', "attention of decoder.0 in chunk 0 is there 2"),
        ('"stages": [', '"levels": [', "nothing is called 'levels'"),
        ('"version": 1', '"goal": 1', "'version' is missing"),
    ],
)
def test_what_was_edited_wrongly_is_named(before: str, after: str, words: str) -> None:
    parts = tuple(
        PlannedPart(0, "decoder.0", name, Placement.SSD, 8) for name in ("attention", "mlp")
    )
    text = plans_to_json([Plan(parts, predicted=Prediction(1.0, 0.0, 0.0, 100))])
    assert before in text
    edited = after.join(text.rsplit(before, 1))
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        plans_from_json(edited)


def test_a_plan_in_the_words_of_earlier_releases_is_read() -> None:
    parts = (
        PlannedPart(0, "decoder.0", "mlp", Placement.SSD, 8),
        PlannedPart(0, "decoder.0", "mlp-selective", Placement.RECOMPUTE, 2),
    )
    text = plans_to_json([Plan(parts)]).replace('"parts"', '"groups"').replace('"part"', '"group"')
    assert text.count("-selective") == 1 and text.count('"group"') == 2
    assert plans_from_json(text.replace("-selective", "-cheap")) == {0: Plan(parts)}


def test_a_stage_is_planned_once() -> None:
    plan = Plan((PlannedPart(0, "decoder.0", "layer", Placement.SSD, 8),))
    with pytest.raises(ConfigurationError, match="stage 0 is there 2 times"):
        plans_from_json(plans_to_json([plan, plan]))


def with_input(where: Placement = Placement.SSD, **changes: Any) -> Plan:
    """As `plan`; the recomputed layer starts from there."""
    *others, last = plan().parts
    return dataclasses.replace(
        plan(), parts=(*others, dataclasses.replace(last, input=where, **changes))
    )


def test_where_an_input_waits_stands_in_files_only_if_it_leaves_memory() -> None:
    text = plans_to_json([with_input()])
    assert text.count('"input": "ssd"') == text.count('"input"') == 1
    assert plans_from_json(text) == {0: with_input()}
    assert '"input"' not in plans_to_json([plan()])
    assert with_input().inputs == {(0, "decoder.4", "layer"): Placement.SSD}
    assert plan().inputs == {}
    kept = text.replace('"input": "ssd"', '"input": "keep"')
    assert plans_from_json(kept) == {0: plan()}
    with pytest.raises(ConfigurationError, match="expected keep, host or ssd"):
        plans_from_json(text.replace('"input": "ssd"', '"input": "dvd"'))


def test_plans_with_other_inputs_have_other_numbers() -> None:
    plans = (plan(), with_input(), with_input(Placement.HOST))
    assert len({one.digest() for one in plans}) == 3


def test_the_table_says_where_an_input_waits() -> None:
    line = plan_table(with_input()).splitlines()[4]
    assert re.split(" {2,}", line.strip())[-3:] == ["8 MiB", "recompute, input to ssd", "cheap"]


@pytest.mark.parametrize(
    ("edited", "sentence"),
    [
        (with_input(Placement.HOST), r"input of decoder\.4 to host.*-host-budget or plan again"),
        (with_input(Placement.RECOMPUTE), "input of .* to recompute"),
        (
            with_input(placement=Placement.SSD),
            "an input of layer of decoder.4, which is not recomputed from one",
        ),
    ],
)
def test_an_input_that_cannot_wait_there_is_refused(edited: Plan, sentence: str) -> None:
    with_input().check(LAYERS, [Placement.SSD])
    with pytest.raises(ConfigurationError, match=sentence):
        edited.check(LAYERS, [Placement.SSD])


def without_replay(which: str = "mlp") -> Plan:
    """As `plan`; parts of this name keep what could be replayed."""
    parts = [dataclasses.replace(one, replays=one.part != which) for one in plan().parts]
    return dataclasses.replace(plan(), parts=tuple(parts))


def test_that_a_part_does_not_replay_stands_in_files_and_in_the_table() -> None:
    text = plans_to_json([without_replay()])
    assert text.count('"replays": false') == text.count('"replays"') == 3
    assert plans_from_json(text) == {0: without_replay()}
    assert '"replays"' not in plans_to_json([plan()])  # nor in files of earlier releases
    assert plans_from_json(text.replace('"replays": false', '"replays": true')) == {0: plan()}
    with pytest.raises(ConfigurationError, match="expected true or false"):
        plans_from_json(text.replace('"replays": false', '"replays": "no"'))
    line = plan_table(without_replay()).splitlines()[3]
    assert re.split(" {2,}", line.strip()) == ["mlp", "5 MiB", "keep, not replayed", "room"]


def test_plans_of_which_other_parts_replay_have_other_numbers() -> None:
    first, *others = without_replay().parts
    less = dataclasses.replace(
        plan(), parts=(first, *(dataclasses.replace(one, replays=True) for one in others))
    )
    assert plan().digest() == less.digest() != without_replay().digest()
    assert without_replay().unreplayed == {(0, f"decoder.{n}", "mlp") for n in (1, 2, 3)}


@pytest.mark.parametrize("which", ["attention", "layer"])
def test_what_moves_or_is_recomputed_cannot_do_without_replay(which: str) -> None:
    without_replay().check(LAYERS, [Placement.SSD])
    with pytest.raises(ConfigurationError, match=rf"{which} of decoder\.\d as .* without replay"):
        without_replay(which).check(LAYERS, [Placement.SSD])
