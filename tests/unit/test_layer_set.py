# SPDX-License-Identifier: Apache-2.0
"""Layers as people write them, and the fixed policy that follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload import ConfigurationError, OffloadConfig, Placement, Scope
from megatron.offload.activations.placement.policy import FixedPolicy
from megatron.offload.layer_set import LayerSet


def names(text: str) -> set[str]:
    layers = LayerSet.parse(text)
    every = (f"{block}.{number}" for block in ("encoder", "decoder") for number in range(1, 13))
    return {name for name in every if name in layers}


def test_numbers_and_ranges_name_layers_of_every_block() -> None:
    assert names("2-3, 12") == {
        f"{block}.{number}" for block in ("encoder", "decoder") for number in (2, 3, 12)
    }


def test_a_block_in_front_names_its_own_layers_only() -> None:
    assert names("encoder.1-2,decoder.4") == {"encoder.1", "encoder.2", "decoder.4"}


@pytest.mark.parametrize("name", ["", "decoder", "0", "decoder.x", "7 "])
def test_what_has_no_number_is_in_no_set(name: str) -> None:
    assert name not in LayerSet.parse("1-100")


def test_it_is_written_as_it_was_read() -> None:
    assert str(LayerSet.parse("1-4, 7,encoder.2-2")) == "1-4,7,encoder.2"
    assert str(LayerSet.parse("all")) == "all" and str(LayerSet.parse("a.b.all,1")) == "a.b.all,1"


def test_all_names_every_layer_of_a_block_or_of_all() -> None:
    assert len(names("all")) == 24
    assert names("encoder.all") == {f"encoder.{number}" for number in range(1, 13)}
    assert "decoder.0" in LayerSet.parse("all") and "decoder" not in LayerSet.parse("all")


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("0-3", None),
        ("all", None),
        ("h.all,h.3", None),
        ("1-4", "4"),
        ("4-9", "4"),
        ("2,3-3,7", "7"),
        ("x.all", "x.all"),
        ("x.0-1", "x.0"),
    ],
)
def test_layers_that_are_not_there_are_found(text: str, missing: str | None) -> None:
    found = LayerSet.parse(text).missing([f"h.{number}" for number in range(4)])
    assert (str(found) if found else None) == missing


@pytest.mark.parametrize("text", ["", "3-1", "a", "1;2", "1-", "-3", "block", "1.5-2", "1,,2"])
def test_what_names_no_layers_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="names no layers"):
        LayerSet.parse(text)


@pytest.mark.parametrize(
    ("one", "two", "both"),
    [
        ("1-4", "5-8", None),
        ("1-4", "4", "4"),
        ("encoder.1-4", "decoder.1-4", None),
        ("encoder.1-4", "3-8", "encoder.3-4"),
    ],
)
def test_layers_in_two_sets_are_found(one: str, two: str, both: str | None) -> None:
    found = LayerSet.parse(one).overlap(LayerSet.parse(two))
    assert (str(found) if found else None) == both


def test_the_fixed_policy_follows_its_lists() -> None:
    policy = FixedPolicy(
        100,
        Placement.HOST,
        offloaded=LayerSet.parse("1-2"),
        recomputed=LayerSet.parse("decoder.3"),
    )
    wanted = {1: Placement.HOST, 2: Placement.HOST, 3: Placement.RECOMPUTE, 4: Placement.KEEP}
    for number, placement in wanted.items():
        scope = Scope(layer=f"decoder.{number}")
        assert policy.place_layer(scope) is placement
        kept = placement is Placement.RECOMPUTE
        assert policy.place(scope, 100) is (Placement.KEEP if kept else placement)
        assert policy.place(scope, 99) is Placement.KEEP


def test_without_lists_every_layer_goes_and_what_is_in_none() -> None:
    policy = FixedPolicy(1)
    assert {policy.place(Scope(layer=name), 1) for name in ("", "decoder.1")} == {Placement.SSD}


def test_a_layer_cannot_be_offloaded_and_recomputed() -> None:
    with pytest.raises(ConfigurationError, match=r"both name decoder\.2-3; take it out"):
        OffloadConfig(
            mode="ssd",
            directories=(Path("/d"),),
            offload_layers=LayerSet.parse("decoder.1-3"),
            recompute_layers=LayerSet.parse("2-9"),
        )


def test_recomputed_layers_need_offload() -> None:
    with pytest.raises(ConfigurationError, match="needs --activation-offload"):
        OffloadConfig(recompute_layers=LayerSet.parse("1"))
