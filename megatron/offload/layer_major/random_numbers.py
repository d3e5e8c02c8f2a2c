# SPDX-License-Identifier: Apache-2.0
"""Random numbers of micro-batches that take turns: `RandomNumbers`.

Note [Random numbers as before]
A generator goes on from one micro-batch to the next. If layers run for all of them in turn, a
later micro-batch needs numbers before the earlier ones have drawn all of theirs. How many each
draws is counted in a step that runs one after the other, and from then on a micro-batch begins as
many numbers after the one before. When that one has ended its generators must stand where the next
has begun: if they do not, the step has used other numbers than a step in the usual order would
have; it logs a warning, and the next step counts again. Numbers that are not torch's (of Python's
`random`, of numpy, of generators of the model's own) are not counted. Where micro-batches draw any,
steps run one micro-batch after the other.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron.offload.errors import STEPS_PREFIX
from megatron.offload.layer_major.other_numbers import OtherNumbers

logger = logging.getLogger(__name__)

_WORDS = slice(24, 24 + 624 * 8)  # of the state of a generator on the CPU: the Mersenne Twister's
_LEFT = slice(8, 12)  # how many of them are left, the next draw included
_NORMAL = slice(24 + 624 * 8, None)  # and normal numbers that were made in pairs, of one left over
_MOST_BLOCKS = 1 << 20  # to look for a state in, 624 numbers each
_DRAWN_AT_ONCE = 1 << 16  # 256 KiB


class Generators(Protocol):
    """All generators that a forward pass draws from."""

    def states(self) -> dict[str, torch.Tensor]:
        """Of each generator, its state, as a tensor of bytes on the CPU."""
        ...

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Puts them to states that `states` gave."""
        ...


class TorchGenerators:
    """Torch's own: the CPU's, and that of a device if it is another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def states(self) -> dict[str, torch.Tensor]:
        """See `Generators`."""
        states = {"cpu": torch.get_rng_state()}
        if self._module is not None:
            states["device"] = self._module.get_rng_state(self._device)
        return states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """See `Generators`."""
        torch.set_rng_state(states["cpu"])
        if self._module is not None:
            self._module.set_rng_state(states["device"], self._device)


class RandomNumbers:
    """How many random numbers each micro-batch of a step draws.

    Args:
        generators: that it draws from.
        others: that it may draw from, and that nothing counts.
        varies: whether a micro-batch draws more or fewer in each step.
    """

    def __init__(
        self,
        generators: Generators,
        others: OtherNumbers | None = None,
        varies: Callable[[], bool] = lambda: False,
    ) -> None:
        self.generators = generators
        self._varies = varies
        self._has_said_varying = False
        self.others = others or OtherNumbers()
        self._others_before = self.others.states()
        self._has_said = False  # that others are drawn from
        self._drawn: list[dict[str, int]] = []  # by micro-batch
        self._has_warned = False

    def knows(self, num_micro_batches: int) -> bool:
        """Whether it is known what all micro-batches of such a step draw."""
        if self._varies():
            if not self._has_said_varying:
                self._has_said_varying = True
                logger.warning(
                    "%sthe model skips layers at random (layerdrop), so its micro-batches draw "
                    "more or fewer random numbers in each step; steps run one micro-batch after "
                    "the other; set its layerdrop to 0 to have them run layer by layer",
                    STEPS_PREFIX,
                )
            return False
        return len(self._drawn) == num_micro_batches

    def starts(self) -> list[dict[str, torch.Tensor]]:
        """Where each micro-batch begins, of a step that begins now."""
        states = [self.generators.states()]
        for drawn in self._drawn[:-1]:
            states.append({name: advanced(one, drawn[name]) for name, one in states[-1].items()})
        return states

    def begin(self) -> None:
        """A step begins."""
        self._others_before = self.others.states()

    def has_drawn(self, begin: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> bool:
        """Whether a number was drawn since `begin` was called, when states were these."""
        if any(not torch.equal(one, now[name]) for name, one in begin.items()):
            return True
        return self.others.states() != self._others_before

    def check_others(self) -> bool:
        """Whether the step has drawn none that are not counted. If it has, the next one counts
        again; that is logged once."""
        if self.others.states() == self._others_before:
            return True
        self._drawn = []
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "%smicro-batches draw random numbers that are not torch's (of Python's random, of "
                "numpy, or of a generator of the model's own), which are not counted; steps run "
                "one micro-batch after the other",
                STEPS_PREFIX,
            )
        return False

    def count(
        self, begins: Sequence[dict[str, torch.Tensor]], ends: Sequence[dict[str, torch.Tensor]]
    ) -> None:
        """Notes what micro-batches that ran one after the other have drawn.

        Args:
            begins: the states before each.
            ends: and after it.
        """
        self._drawn = []
        if not self.check_others():
            return
        for begin, end in zip(begins, ends, strict=True):
            drawn = {name: num_drawn(one, end[name]) for name, one in begin.items()}
            if any(one is None for one in drawn.values()):
                self._drawn = []
                self._warn()
                return
            self._drawn.append({name: one for name, one in drawn.items() if one is not None})

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%sthe random numbers that a micro-batch draws cannot be counted (was a generator "
                "seeded in the forward pass, or an odd number of normal ones drawn?); steps run "
                "one micro-batch after the other",
                STEPS_PREFIX,
            )

    def forget(self) -> None:
        """The counts were wrong: the next step counts anew."""
        self._drawn = []


def num_drawn(begin: torch.Tensor, end: torch.Tensor) -> int | None:
    """How many numbers lie between two states of a generator; None: it cannot be found out.

    Numbers of 32 bits of the CPU's Mersenne Twister, offsets of a counter (Philox) elsewhere.
    """
    if torch.equal(begin, end):
        return 0
    if begin.numel() != end.numel() or begin.numel() not in (_PHILOX.size, _TWISTER_BYTES):
        return None
    if begin.numel() == _PHILOX.size:
        (seed, offset), (end_seed, end_offset) = _philox(begin), _philox(end)
        return end_offset - offset if seed == end_seed and end_offset >= offset else None
    if not torch.equal(begin[_NORMAL], end[_NORMAL]):  # the next micro-batch uses the one left over
        return None
    generator = torch.Generator().set_state(begin)
    words, left = end[_WORDS], _left(end)
    total = 0
    for _ in range(_MOST_BLOCKS):
        state = generator.get_state()
        now = _left(state)
        if torch.equal(state[_WORDS], words) and now >= left:
            return total + now - left
        _draw(generator, now)  # the last of these is the first number of the next block
        total += now
    return None


def advanced(state: torch.Tensor, number: int) -> torch.Tensor:
    """The state of a generator after so many numbers, as `num_drawn` counts them."""
    if not number:
        return state
    if state.numel() == _PHILOX.size:
        seed, offset = _philox(state)
        after = bytearray(_PHILOX.pack(seed, offset + number))
        return torch.frombuffer(after, dtype=torch.uint8)
    generator = torch.Generator().set_state(state)
    _draw(generator, number)
    return generator.get_state()


_TWISTER_BYTES = torch.Generator().get_state().numel()
_PHILOX = struct.Struct("=QQ")  # seed, offset


def _philox(state: torch.Tensor) -> tuple[int, int]:
    seed, offset = _PHILOX.unpack(bytes(state.tolist()))
    return seed, offset


def _left(state: torch.Tensor) -> int:
    return int.from_bytes(bytes(state[_LEFT].tolist()), "little")


def _draw(generator: torch.Generator, number: int) -> None:
    drawn = torch.empty(min(number, _DRAWN_AT_ONCE), dtype=torch.int32, device="cpu")
    for begin in range(0, number, _DRAWN_AT_ONCE):
        drawn[: number - begin].random_(generator=generator)
