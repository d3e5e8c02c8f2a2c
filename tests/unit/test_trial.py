# SPDX-License-Identifier: Apache-2.0
"""A trial of an optimizer's step whose bits come by chance, as those of a kernel that reads on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from megatron.offload import ConfigurationError
from megatron.offload.states.trial import Trial


class Scripted(Trial):
    """Its runs give these numbers in turn, the last one for good."""

    def __init__(self, together: Sequence[int], in_slices: Sequence[int]) -> None:
        self._params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        for one in self._params:
            one.grad = torch.ones(4)
        super().__init__(torch.optim.SGD(self._params), lambda *_: None)
        # The first run is compared with slices that keep their places, which are wrong here.
        self._together = self._endless([together[0], *together])
        self._in_slices = self._endless(in_slices)

    @staticmethod
    def _endless(numbers: Sequence[int]) -> Iterator[int]:
        return itertools.chain(numbers, itertools.repeat(numbers[-1]))

    def _run(
        self,
        params: Sequence[torch.Tensor],
        *,
        in_slices: bool = False,
        keeps_places: bool = False,
        seed: int = 0,
    ) -> list[torch.Tensor]:
        if keeps_places:
            return [torch.tensor(-1)]
        return [torch.tensor(next(self._in_slices if in_slices else self._together))]

    def run(self) -> bool:
        return self.keeps_places(self._params)


@pytest.mark.parametrize(
    ("together", "in_slices"),
    [([1, 1, 3], [2]), ([1, 1, 1, 3], [2]), ([1], [2, 2, 3]), ([1, 3], [2]), ([1], [2, 3])],
)
def test_bits_that_come_by_chance_are_a_warning(
    together: list[int], in_slices: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    Scripted(together, in_slices).run()
    assert "give other bits each time" in caplog.text


def test_bits_that_stay_apart_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="updates a parameter otherwise where there are"):
        Scripted([1], [2]).run()


def test_the_same_bits_need_no_more_runs(caplog: pytest.LogCaptureFixture) -> None:
    assert not Scripted([1, 3], [1, 2]).run()
    assert not caplog.text
