# SPDX-License-Identifier: Apache-2.0
"""The mistakes that the ordering stress has to find can be made, and are undone again."""

from __future__ import annotations

import pytest

from megatron.offload.device.accelerator import AcceleratorDevice
from tests.support.layer_major_stress import LAYER_MAJOR_MODES
from tests.support.ordering_mistakes import MISTAKES, Mistake, made, source_of
from tests.support.ordering_stress import MODES
from tests.support.states_stress import STATES_MODES

ALL_MODES = (MODES, STATES_MODES, LAYER_MAJOR_MODES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_each_can_be_made_in_the_package_as_it_is(mistake: Mistake) -> None:
    assert any(set(mistake.modes) <= set(modes) for modes in ALL_MODES) and mistake.changes
    for mutation in mistake.mutations():
        source = source_of(mutation)
        assert mutation.apply(source) != source
    with made(mistake):
        pass


def test_a_mistake_is_there_within_the_context_and_nowhere_else() -> None:
    mistake = next(one for one in MISTAKES if "compute does not wait" in one.what)
    right = AcceleratorDevice.wait_on_stream
    with made(mistake):
        wrong = AcceleratorDevice.wait_on_stream
        assert wrong is not right
        assert "wait_event" in right.__code__.co_names
        assert "wait_event" not in wrong.__code__.co_names
    assert AcceleratorDevice.wait_on_stream is right
