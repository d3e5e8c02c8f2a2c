# SPDX-License-Identifier: Apache-2.0
"""Training on streams that lag keeps its bits, and the stress notices wrong waits and reuses.

A few runs of what `tests/ordering.py` does with many.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.lag.module import LagModule
from tests.support.layer_major_stress import LAYER_MAJOR_MODES, LayerMajorStress
from tests.support.ordering_mistakes import MISTAKES, made
from tests.support.ordering_stress import OrderingStress
from tests.support.states_stress import STATES_MODES, StatesStress

WRONG = (
    "memory is let go when its copy to the host is queued",
    "the main stream waits for what was copied back, whatever stream uses it",
    "a staging buffer is taken again while a copy reads it",
)
WRONG_STATES = (
    "the optimizer does not wait for states that were copied back",
    "states are copied to the host before they are updated",
    "gradients arrive in the memory of those that the step works on",
    "parameters are copied back on a stream that compute does not wait for",
)
WRONG_LAYER_MAJOR = (
    "a unit takes a gradient that has not come back",
    "a unit's memory is reused while layers are still to read it",
)


@pytest.fixture(scope="module")
def prepared(
    loaded_lag: LagModule, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OrderingStress]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels of several streams have a core each
    yield OrderingStress(loaded_lag, tmp_path_factory.mktemp("tier"))
    torch.set_num_threads(before)


@pytest.fixture
def stress(lag: LagModule, prepared: OrderingStress) -> OrderingStress:
    return prepared


def test_the_model_itself_keeps_its_bits(stress: OrderingStress) -> None:
    assert not stress.run_without_offload(seed=1).found


@pytest.mark.slow(but="tiered, pinned")
@pytest.mark.parametrize("mode", ["ssd", "host", "tiered, pinned"])
def test_loss_and_gradients_are_equal(stress: OrderingStress, mode: str) -> None:
    outcome = stress.run(mode, seed=1)
    assert not outcome.found
    assert outcome.offloaded_bytes > 0


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(stress: OrderingStress, what: str) -> None:
    mistake = next(one for one in MISTAKES if one.what == what)
    with made(mistake):
        assert any(stress.run(mistake.modes[0], seed).found for seed in range(3))


@pytest.fixture
def states_stress(
    lag: LagModule, prepared: OrderingStress, tmp_path_factory: pytest.TempPathFactory
) -> StatesStress:
    return StatesStress(lag, tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("mode", STATES_MODES)
def test_weights_and_states_are_equal(states_stress: StatesStress, mode: str) -> None:
    outcome = states_stress.run(mode, seed=1)
    assert not outcome.found
    assert outcome.offloaded_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG_STATES)
def test_what_is_wrong_with_states_is_found(states_stress: StatesStress, what: str) -> None:
    mistake = next(one for one in MISTAKES if one.what == what)
    with made(mistake):
        assert any(states_stress.run(mistake.modes[0], seed).found for seed in range(16))


@pytest.fixture(scope="module")
def layer_major_stress(
    prepared: OrderingStress, loaded_lag: LagModule, tmp_path_factory: pytest.TempPathFactory
) -> LayerMajorStress:
    return LayerMajorStress(loaded_lag, tmp_path_factory.mktemp("units"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[pytest.mark.rare] if mode.endswith("ssd") else [])
        for mode in LAYER_MAJOR_MODES
    ],
)
def test_losses_norms_and_weights_are_equal(
    lag: LagModule, layer_major_stress: LayerMajorStress, mode: str
) -> None:
    outcome = layer_major_stress.run(mode, seed=1)
    assert not outcome.found
    assert outcome.offloaded_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG_LAYER_MAJOR)
def test_what_is_wrong_with_layer_major_steps_is_found(
    lag: LagModule, layer_major_stress: LayerMajorStress, what: str
) -> None:
    mistake = next(one for one in MISTAKES if one.what == what)
    with made(mistake):
        assert any(layer_major_stress.run(mistake.modes[0], seed).found for seed in range(3))
