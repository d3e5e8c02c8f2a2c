# SPDX-License-Identifier: Apache-2.0
"""The parameters that a layer writes to in its forward, as they were: `ParameterSnapshot`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.offload.activations.saved.recipe import bits_of
from megatron.offload.errors import ChangedInPlaceError
from megatron.offload.integration.torch.buffer_snapshot import fingerprint_of
from megatron.offload.integration.torch.noted_tensor import version_of

MOST_COPIED_BYTES = 1 << 24  # of a parameter, in the first call, while the layer runs
_COMPUTING = "ComputingParameter"  # one that is on a tier, while its layer computes
_DATA: Any = torch.Tensor.data

Place = tuple[int, str]  # of a parameter: the address of a module, and its name there


@dataclass
class Written:
    """To which parameters the calls of a layer have been seen to write.

    Attributes:
        is_known: whether a call has been seen.
        places: of those parameters.
    """

    is_known: bool = False
    places: set[Place] = field(default_factory=set)


@dataclass
class _Copied:
    """A parameter that the layer may write to, before its forward and after it."""

    place: Place
    parameter: torch.Tensor
    before: torch.Tensor
    version: int = 0  # after it, as the fingerprint
    fingerprint: torch.Tensor | None = None  # None: it has not ended


class ParameterSnapshot:
    """What some parameters of a layer held when this was made, for when its forward runs again.

    A codebook that follows what it is given writes moving averages to its parameter; autograd does
    not count what goes through `.data`. A layer's first call shows which of its parameters it
    writes to: all but large ones are copied while it runs, and of large ones a sum is compared.
    Later calls copy what the first has written to, the same bits even, as an embedding with a
    `max_norm` does to a small weight. What stands in a parameter's place (`functional_call` puts
    tensors there) is copied as a parameter is.

    Args:
        parameters: of the layer, by their places.
        written: by its earlier calls.
    """

    def __init__(self, parameters: Mapping[Place, torch.Tensor], written: Written) -> None:
        self._written = written
        self._parameters = parameters
        self._copied: list[_Copied] = []
        self._sums: list[tuple[Place, torch.Tensor]] = []
        if written.is_known and not written.places:
            return
        for place, one in parameters.items():
            if not _is_plain(one):
                continue
            if place in written.places or (
                not written.is_known and one.nbytes <= MOST_COPIED_BYTES
            ):
                self._copied.append(_Copied(place, one, one.detach().clone()))
            elif not written.is_known:
                self._sums.append((place, _sum(one)))

    def keep_written(self, counted: Sequence[Place]) -> str:
        """That forward has ended: lets go of copies that are not needed.

        Args:
            counted: places of parameters of which autograd has counted a change.

        Returns:
            The name of a parameter that was written to and has no copy; empty: there is none.
        """
        written, parameters = self._written, self._parameters
        if written.is_known:
            copied = self.copied
            without = [one for one in counted if one not in copied and _is_plain(parameters[one])]
            written.places |= {*without}
        else:
            self._copied = [
                one
                for one in self._copied
                if one.place in counted or not _has_same_bits(one.parameter, one.before)
            ]
            large = [place for place, _ in self._sums if place in counted]
            without = [
                place
                for place, before in self._sums
                if not torch.equal(_sum(parameters[place]), before)
            ]
            written.places |= {*self.copied, *large, *without}
        for one in self._copied:
            one.version = version_of(one.parameter)
            one.fingerprint = fingerprint_of(one.parameter)
        written.is_known = True
        self._sums = []
        return without[0][1] if without else ""

    @property
    def copied(self) -> set[Place]:
        """The places of parameters that it puts back."""
        return {one.place for one in self._copied}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which these parameters hold what they held before, uncounted.

        Raises:
            ChangedInPlaceError: others have changed one in place since. What the second run saves
                is the parameter itself, which has those values again when the run has ended.
        """
        for one in self._copied:
            if one.fingerprint is None or version_of(one.parameter) == one.version:
                continue
            if not torch.equal(fingerprint_of(one.parameter), one.fingerprint):
                raise changed_since(one.place[1])
        present = [one.parameter.detach().clone() for one in self._copied]
        for one in self._copied:
            _DATA.__get__(one.parameter).copy_(one.before)
        try:
            yield
        finally:
            for one, value in zip(self._copied, present, strict=True):
                _DATA.__get__(one.parameter).copy_(value)


def changed_since(name: str) -> ChangedInPlaceError:
    """The error where a parameter is no longer as the layer has left it."""
    return ChangedInPlaceError(
        f"a parameter, {name}, of a layer that is to be recomputed was changed in place since the "
        "layer ran; call backward() before the optimizer's step, or do not recompute the layer"
    )


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether its bytes are in memory, and no others'."""
    kind = type(parameter)
    is_ours = kind.__name__ == _COMPUTING
    if kind is not torch.nn.Parameter and kind is not torch.Tensor and not is_ours:
        return False
    is_strided = parameter.layout is torch.strided and not parameter.is_meta
    return is_strided and 0 < parameter.nbytes <= parameter.untyped_storage().nbytes()


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def _sum(parameter: torch.Tensor) -> torch.Tensor:
    """Of its bits."""
    return bits_of(parameter).sum(dtype=torch.int64)
