# SPDX-License-Identifier: Apache-2.0
"""Parameters that ranks update in shards and bring together unit by unit: `GatheredParameters`.

For Megatron's distributed optimizer, whose parameters wait on a tier. `parameters.py` makes it.

Note [Megatron's buffer, in units]
DistributedDataParallel keeps all parameters of a type in one buffer, in buckets. Each data-parallel
rank updates its shard of every bucket, and an all-gather brings each bucket together. One buffer
cannot leave unit by unit. So the parameters of each unit get memory of their own, those outside of
layers too, and the buffer is given up; what Megatron looks for in it is found by its place in the
bucket (`_BucketInUnits`). Gradients, buckets and shards stay as Megatron has made them, and with
them every sum over ranks and every norm: all bits are the same.

Note [A step in two passes]
First each rank updates its shards, unit by unit, at its own pace: mostly they are in units of
which other ranks have none. Then all ranks go through all units together, and the rank that has
updated a piece of a unit broadcasts it. A rank does not read a unit of which it has updated nothing
before it receives all of its bytes, and does not write a unit again that it alone has updated. In
both passes no more units are in memory than may live. What a tier does not take stays in memory,
and no rank waits; a rank that cannot read a unit raises an error that says so, and the others find
its connections closed.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.offload.integration.megatron.bucket_group import all_of
from megatron.offload.integration.own_attributes import put, within
from megatron.offload.parameters.parameter_places import Part
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.parameters.window import ParameterWindow

# Attributes of a distributed optimizer: groups of the model's parameters, and this rank's shards.
_SHARDS = (
    ("model_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


class GatheredParameters:
    """Where the parameters of DistributedDataParallel's buffers are once units have them.

    Args:
        model_chunks: wrapped in DistributedDataParallel, of which nothing is touched yet.
        optimizers: the distributed optimizers of these chunks.

    Attributes:
        parts: this rank's shards, by the model's parameters.
    """

    def __init__(self, model_chunks: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._buffers = [buffer for chunk in model_chunks for buffer in all_of(chunk, "buffers")]
        self._bucket_groups = [
            group for chunk in model_chunks for group in all_of(chunk, "bucket_groups")
        ]
        self._places: dict[torch.nn.Parameter, _Place] = {}
        for buffer in self._buffers:
            for param, (start, end, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                self._places[param] = _Place(
                    bucket, buffer.data_parallel_group, start - bucket.offset, end - bucket.offset
                )
        self.parts: dict[torch.Tensor, Part] = {}
        for optimizer in optimizers:
            for model_name, shard_name in _SHARDS:
                groups = zip(
                    getattr(optimizer, model_name), getattr(optimizer, shard_name), strict=True
                )
                for params, shards in groups:
                    for param, shard in zip(params, shards, strict=True):
                        self.parts[param] = self._places[param].own_part(shard)
        self._undo = contextlib.ExitStack()
        self._due: set[int] = set()  # buckets that are to be gathered, by their identity
        self._is_in_step = False
        self._window: ParameterWindow
        self._units: list[_Unit] = []
        self._rest: _Unit | None = None  # outside of layers: it stays in memory

    def connect(self, window: ParameterWindow, optimizer: Any) -> None:
        """Gives up Megatron's buffers; the units have their parameters.

        Args:
            window: has the units.
            optimizer: the outermost of Megatron's; parameters are gathered at the end of its step.
        """
        self._window = window
        self._units = [_Unit(unit, self._places) for unit in window.units]
        others = [param for param in self._places if not window.has(param)]
        if others:
            rest = ParameterUnit("what is in no layer", others, window.device, self.parts)
            self._rest = _Unit(rest, self._places)
        for param, part in self.parts.items():
            base = part.tensor._base
            if base is not None and base is not param:  # of autograd alone, and in the buffer
                base.data = base.new_empty(0)
        for buffer in self._buffers:
            buffer.param_data = None
            for bucket in buffer.buckets:
                bucket.param_data = _BucketInUnits(
                    [
                        (place.start, place.end, param)
                        for param, place in self._places.items()
                        if place.bucket is bucket
                    ]
                )
        for group in self._bucket_groups:
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)  # found anew
            begin = functools.partial(self._begin_gather, group)
            self._undo.callback(put(group, "start_param_sync", begin))
        self._undo.callback(within(optimizer, "step", self._one_gather))

    def disconnect(self) -> None:
        """Megatron gathers its buffers itself again; call `restore` before it does."""
        self._undo.close()

    def restore(self) -> None:
        """Puts all parameters back into Megatron's buffers, wherever they are in memory."""
        for buffer in self._buffers:
            data = torch.zeros(
                buffer.numel, dtype=buffer.param_dtype, device=buffer.grad_data.device
            )
            for param, (start, end, _) in buffer.param_index_map.items():
                view = data[start:end].view(param.shape)
                view.copy_(param.detach())
                param.data = view
                if param in self.parts:
                    part = self.parts[param]
                    part.tensor.data = view.view(-1)[part.start : part.end]
            buffer.param_data = data
            for bucket in buffer.buckets:
                end = bucket.offset + bucket.grad_data.numel()
                bucket.param_data = data[bucket.offset : end]

    # -- Gathering --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _one_gather(self) -> Iterator[None]:
        """Around a step: what its optimizers ask to gather is gathered once, at its end."""
        self._is_in_step = True
        try:
            yield
        except BaseException:
            self._window.is_whole = False  # a part of the shards may be updated
            raise
        finally:
            self._is_in_step = False
        self._gather()

    def _begin_gather(self, group: Any, *_: Any, **__: Any) -> None:
        """Replaces a bucket group's `start_param_sync`."""
        self._due |= {id(bucket) for bucket in group.buckets}
        if not self._is_in_step:
            self._gather()

    def _gather(self) -> None:
        """Brings together what ranks have updated; all of them call it."""
        due, self._due = self._due, set()
        if not due:
            return
        window = self._window
        window.is_whole = False
        unread = {number for number, unit in enumerate(self._units) if unit.is_all_others(due)}
        # Backwards, as the next forward pass begins with the first ones.
        for number in reversed(range(len(self._units))):
            unit = self._units[number]
            if unit.is_shared(due):
                window.use(number, -1, unread=unread)
                unit.gather(due)
        if self._rest is not None:
            self._rest.gather(due)
        window.is_whole = True


class _Place(NamedTuple):
    """Where a parameter is in its bucket, in elements, and which ranks share the bucket."""

    bucket: Any
    group: dist.ProcessGroup
    start: int
    end: int

    def owners(self) -> Iterator[tuple[int, int, int]]:
        """Each rank of the group that updates some of it; which elements of it, first and end."""
        size = self.bucket.grad_data.numel() // self.group.size()
        for owner in range(self.start // size, (self.end - 1) // size + 1):
            first, end = max(self.start, owner * size), min(self.end, (owner + 1) * size)
            yield owner, first - self.start, end - self.start

    def own_part(self, shard: torch.Tensor) -> Part:
        """What a shard of this rank is of it."""
        own = self.group.rank()
        (part,) = [Part(shard, first, end) for owner, first, end in self.owners() if owner == own]
        assert shard.numel() == part.end - part.start, "the shards are not Megatron's"
        return part


class _Piece(NamedTuple):
    """Bytes of a unit that one rank updates."""

    bucket: int  # its identity
    group: dist.ProcessGroup
    owner: int  # its rank in the group
    where: slice

    @property
    def is_own(self) -> bool:
        """Whether this rank does."""
        return self.owner == self.group.rank()


class _Unit:
    """A unit as pieces that ranks have updated.

    Args:
        unit: of the window.
        places: of all parameters that are trained.
    """

    def __init__(self, unit: ParameterUnit, places: dict[torch.nn.Parameter, _Place]) -> None:
        self._unit = unit
        self._pieces: list[_Piece] = []
        self._is_trained = all(param in places for param in unit.params)
        goes_on = False  # what comes next lies behind the last piece, but for padding
        for index, param in enumerate(unit.params):
            place = places.get(param)
            for owner, start, end in () if place is None else place.owners():
                assert place is not None
                where = unit.bytes_of(index, start, end)
                piece = _Piece(id(place.bucket), place.group, owner, where)
                last = self._pieces[-1] if goes_on else None
                if last is not None and (last.bucket, last.owner) == (piece.bucket, owner):
                    piece = piece._replace(where=slice(last.where.start, where.stop))
                    self._pieces.pop()
                self._pieces.append(piece)
                goes_on = True
            goes_on = goes_on and place is not None

    def is_shared(self, due: set[int]) -> bool:
        """Whether there is anything to gather of it."""
        return bool(self._shared(due))

    def is_all_others(self, due: set[int]) -> bool:
        """Whether all of its bytes come from other ranks."""
        is_all = len(self._shared(due)) == len(self._pieces) and self._is_trained
        return is_all and not any(piece.is_own for piece in self._pieces)

    def gather(self, due: set[int]) -> None:
        """Sends and receives its pieces; it has memory."""
        pieces, memory = self._shared(due), self._unit.bytes
        under_way = [
            dist.broadcast(
                memory[piece.where],
                dist.get_global_rank(piece.group, piece.owner),
                group=piece.group,
                async_op=True,
            )
            for piece in pieces
        ]
        for one in under_way:
            if one is not None:  # it is of no rank outside of its group
                one.wait()
        if not all(piece.is_own for piece in pieces):
            self._unit.note_change()
            self._unit.bring()  # to the places of its parameters, if it was not read

    def _shared(self, due: set[int]) -> list[_Piece]:
        return [one for one in self._pieces if one.bucket in due and one.group.size() > 1]


class _BucketInUnits:
    """In the place of a bucket's `param_data`: gives elements of one parameter at a time.

    Args:
        spans: of the bucket's parameters, first element and end.
    """

    def __init__(self, spans: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        self._spans = sorted(spans, key=lambda span: span[0])
        self._starts = [start for start, _, _ in self._spans]

    def view(self, _: int) -> _BucketInUnits:
        """It has one dimension."""
        return self

    def __getitem__(self, where: slice) -> torch.Tensor:
        start, end, param = self._spans[bisect.bisect_right(self._starts, where.start) - 1]
        assert start <= where.start <= where.stop <= end, "this is not of one parameter"
        return param.data.view(-1)[where.start - start : where.stop - start]
