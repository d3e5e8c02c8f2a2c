# SPDX-License-Identifier: Apache-2.0
"""The parameters that a layer writes to in its forward, as they were: `ParameterSnapshot`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.offload.activations.saved.recipe import bits_of

MOST_COPIED_BYTES = 1 << 24  # of a parameter, in the first call, while the layer runs
_COMPUTING = "ComputingParameter"  # one that is on a tier, while its layer computes
_DATA: Any = torch.Tensor.data


@dataclass
class Written:
    """To which parameters the calls of a layer have been seen to write.

    Attributes:
        is_known: whether a call has been seen.
        places: of those parameters, among all of the layer.
    """

    is_known: bool = False
    places: set[int] = field(default_factory=set)


class ParameterSnapshot:
    """What some parameters of a layer held when this was made, for when its forward runs again.

    A codebook that follows what it is given writes moving averages to its parameter; autograd does
    not count what goes through `.data`. A layer's first call shows which of its parameters it
    writes to: all but large ones are copied while it runs, and of large ones a sum is compared.
    Later calls copy what the first has changed.

    Args:
        modules: of the layer.
        written: by its earlier calls.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], written: Written) -> None:
        self._written = written
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._sums: list[tuple[int, str, torch.Tensor, torch.Tensor]] = []
        if written.is_known and not written.places:
            return
        found = (
            (name, one)
            for module in modules
            if type(module._parameters) is dict
            for name, one in module._parameters.items()
            if one is not None
        )
        for place, (name, one) in enumerate(found):
            if not _is_plain(one):
                continue
            if place in written.places or (
                not written.is_known and one.nbytes <= MOST_COPIED_BYTES
            ):
                self._copies.append((place, one, one.detach().clone()))
            elif not written.is_known:
                self._sums.append((place, name, one, _sum(one)))

    def keep_changed(self) -> str:
        """That forward has ended: lets go of copies that are not needed.

        Returns:
            The name of a parameter that was written to and has no copy; empty: there is none.
        """
        without = ""
        if not self._written.is_known:
            self._copies = [
                (place, one, copy)
                for place, one, copy in self._copies
                if not torch.equal(bits_of(one), bits_of(copy))
            ]
            self._written.places |= {place for place, _, _ in self._copies}
            for place, name, one, before in self._sums:
                if not torch.equal(_sum(one), before):
                    self._written.places.add(place)
                    without = name
        self._written.is_known = True
        self._sums = []
        return without

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which these parameters hold what they held before, uncounted."""
        present = [one.detach().clone() for _, one, _ in self._copies]
        for _, one, copy in self._copies:
            _DATA.__get__(one).copy_(copy)
        try:
            yield
        finally:
            for (_, one, _), value in zip(self._copies, present, strict=True):
                _DATA.__get__(one).copy_(value)


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether its bytes are in memory, and no others'."""
    kind = type(parameter)
    if kind is not torch.nn.Parameter and kind.__name__ != _COMPUTING:
        return False
    is_strided = parameter.layout is torch.strided and not parameter.is_meta
    return is_strided and 0 < parameter.nbytes <= parameter.untyped_storage().nbytes()


def _sum(parameter: torch.Tensor) -> torch.Tensor:
    """Of its bits."""
    return bits_of(parameter).sum(dtype=torch.int64)
