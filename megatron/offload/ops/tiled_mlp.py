# SPDX-License-Identifier: Apache-2.0
"""An MLP or a norm over tiles of tokens: `tiled`, `tile_tokens_of`.

An MLP widens each token three to eight times, and saves most of that for backward: of a long
sequence it is the burst of memory that is left when layers are recomputed. Tokens are independent
there, so forward runs tile by tile and keeps its input alone; backward runs a tile again, takes its
gradients, and goes on to the next. What a tile has drawn it draws again. A norm that is written in
Python widens each token too, to several tensors in fp32. Integrations find both
(`integration/tiled_mlps.py`, of Megatron the MLPs: `integration/megatron/tiled_mlps.py`) and call
`tiled` in their place.

The tiles and their default size are those of ALST (arXiv 2506.13996).

Note [Sums of tiles]
The gradient of a weight is a sum over all tokens. Tiles are added in fp32 where weights have fewer
bits, and autograd gets the sum once, so whatever listens to a parameter's gradient (DDP's buckets,
FSDP, ZeRO) hears of it once. Only the order of that sum differs from one large product's: gradients
are not bit-identical, and the loss is where a product of fewer rows has the same bits. Megatron's
fused kernel adds a tile's gradient to `weight.main_grad` itself, and hands autograd a tensor that
only says so: the last of these is handed on.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

Run = Callable[[torch.Tensor], torch.Tensor]

_LEAST_TOKENS = 1024  # of a tile of `auto`: products of fewer rows are slower


@dataclass(frozen=True)
class Tiles:
    """How an MLP is divided.

    Attributes:
        tokens: most of a tile; tiles are equally long, but for the last one.
        tokens_first: it maps [tokens, 1, hidden], not [1, tokens, hidden].
        added_by_it: parameters whose gradients its own backward adds to `main_grad`. It finds that
            by the parameter that it saved, so no saved-tensor hook may unpack another object.
        replayed_by: computes the result of the input and the parameters, for replay; the same
            object, or an equal one, for each call of a module. None: it costs too much.
    """

    tokens: int
    tokens_first: bool = False
    added_by_it: Collection[torch.Tensor] = field(default=(), repr=False)
    replayed_by: Callable[..., torch.Tensor] | None = None

    @property
    def dim(self) -> int:
        """That of tokens."""
        return 0 if self.tokens_first else 1

    def of(self, x: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Begin and number of tokens of each."""
        tokens = x.shape[self.dim]
        rows = -(-tokens // self.number(tokens))
        return ((begin, min(rows, tokens - begin)) for begin in range(0, tokens, rows))

    def number(self, tokens: int) -> int:
        """Tiles that so many tokens are divided into."""
        return -(-tokens // self.tokens)

    def is_added_by_it(self, parameter: torch.Tensor) -> bool:
        """Whether what autograd gets for a parameter is not its gradient."""
        return any(parameter is one for one in self.added_by_it)


def tile_tokens_of(hidden_size: int) -> int:
    """Tokens of a tile that keep products of matrices large and what they make small."""
    return max(hidden_size, _LEAST_TOKENS)


def tiled(
    run: Run,
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    tiles: Tiles,
    as_before: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> torch.Tensor:
    """What `run` makes of all tokens, computed over tiles of them, forward and backward.

    Args:
        run: maps tokens of [..., hidden] to [..., any], each by itself, as `tiles` says; the same
            again in backward, where autograd is on.
        x: [..., hidden].
        parameters: all that `run` uses and that may want a gradient.
        tiles: how tokens are divided.
        as_before: makes a context in which `run` finds in backward what it finds now.

    Returns:
        [..., any], as `run(x)` within rounding.
    """
    tokens = x.numel() // max(x.shape[-1], 1)
    if tiles.number(tokens) <= 1:
        return run(x)
    shape = [1, 1, x.shape[-1]]
    shape[tiles.dim] = tokens
    result = _Tiled.apply(x.reshape(shape), run, tiles, as_before, *parameters)
    return result.view(*x.shape[:-1], result.shape[-1])


def in_tiles(run: Run, x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """What `run` makes of each tile, in one tensor; see `tiled` for the arguments.

    Args:
        run: as for `tiled`.
        x: [1, tokens, hidden], or tokens first.
        tiles: as for `tiled`.
    """
    result: torch.Tensor | None = None
    for begin, rows in tiles.of(x):
        tile = run(x.narrow(tiles.dim, begin, rows))
        if result is None:
            result = tile.new_empty(*x.shape[:-1], tile.shape[-1])
        result.narrow(tiles.dim, begin, rows).copy_(tile)
    assert result is not None
    return result.data  # as if it had been made at once: that it was filled is no change of it


class _Tiled(torch.autograd.Function):
    """[1, tokens, hidden] to [1, tokens, any], or tokens first."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, run: Run, tiles: Tiles, as_before: Any, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.run, ctx.tiles, ctx.as_before = run, tiles, as_before
        drawn: list[_Generators] = []  # before each tile: it is to draw the same in backward
        ctx.autocast = _autocast_like_now(x.device.type)
        ctx.variables = contextvars.copy_context()
        ctx.replayed_by = tiles.replayed_by
        ctx.save_for_backward(x, *parameters)

        def run_tile(tile: torch.Tensor) -> torch.Tensor:
            drawn.append(_Generators(x))
            return run(tile)

        result = in_tiles(run_tile, x, tiles)
        ctx.drawn = [] if _Generators(x).is_where(drawn[0]) else drawn
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        needs_x, _, _, _, *needed = ctx.needs_input_grad
        wanted = [one for one, is_needed in zip(parameters, needed, strict=True) if is_needed]
        grad_x = torch.empty_like(x) if needs_x else None
        sums = [_Last() if tiles.is_added_by_it(one) else _Sum(one) for one in wanted]
        saves = contextlib.nullcontext if tiles.added_by_it else nothing_moves
        for number, (begin, rows) in enumerate(tiles.of(x)):
            drawn = ctx.drawn[number].again() if ctx.drawn else contextlib.nullcontext()
            with torch.enable_grad(), ctx.autocast(), saves(), drawn, ctx.as_before():
                tile = x.narrow(tiles.dim, begin, rows).detach().requires_grad_(needs_x)
                result = ctx.variables.copy().run(ctx.run, tile)
            inputs = [tile, *wanted] if needs_x else wanted
            given = grad.narrow(tiles.dim, begin, rows)
            found = torch.autograd.grad(result, inputs, given, allow_unused=True)
            del result
            if grad_x is not None:
                grad_x.narrow(tiles.dim, begin, rows).copy_(found[0])
                found = found[1:]
            for total, one in zip(sums, found, strict=True):
                total.add(one)
        totals = iter(sums)
        of_parameters = [next(totals).result() if is_needed else None for is_needed in needed]
        return grad_x, None, None, None, *of_parameters


def nothing_moves() -> contextlib.AbstractContextManager[Any]:
    """A context in which what operations save stays where it is: it is used at once."""
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def draws_as_before(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context after which torch's generators, also those of a tensor's device, draw what they
    would have drawn without it."""
    return _Generators(x).again()


class _Generators:
    """The states of torch's generators now, of the host and of a tensor's device."""

    def __init__(self, x: torch.Tensor) -> None:
        self._kind = x.device.type
        self._of_host = torch.get_rng_state()
        self._devices, self._of_devices = get_device_states(x)

    def is_where(self, other: _Generators) -> bool:
        """Whether nothing was drawn between the two."""
        states = zip(
            [self._of_host, *self._of_devices], [other._of_host, *other._of_devices], strict=True
        )
        return all(torch.equal(one, same) for one, same in states)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context in which they have these states."""
        kind = "cuda" if self._kind == "cpu" else self._kind  # of no device, then
        with torch.random.fork_rng(self._devices, device_type=kind):
            torch.set_rng_state(self._of_host)
            set_device_states(self._devices, self._of_devices, device_type=self._kind)
            yield


class _Sum:
    """The gradient of one parameter: Note [Sums of tiles]."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._dtype = parameter.dtype
        self._total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor | None) -> None:
        """Takes a tile's."""
        if grad is None:
            return
        if self._total is None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            self._total = grad.to(wide, copy=True)  # two parameters may get the same tensor
        else:
            self._total += grad

    def result(self) -> torch.Tensor | None:
        """The sum, rounded once; None: no tile used the parameter. It is not kept."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


class _Last:
    """What autograd gets for a parameter whose gradient is added elsewhere."""

    def __init__(self) -> None:
        self._found: torch.Tensor | None = None

    def add(self, found: torch.Tensor | None) -> None:
        """Takes a tile's."""
        self._found = found

    def result(self) -> torch.Tensor | None:
        """That of the last tile. It is not kept."""
        found, self._found = self._found, None
        return found


def _autocast_like_now(device_type: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes contexts in which autocast is as it is now; backward runs outside of it."""
    states = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys((device_type, "cpu"))
        if torch.amp.is_autocast_available(kind)
    ]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, is_enabled, dtype in states:
                # Not from the cache: the casts in it are of forward, and have no graph here.
                one = torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=False)
                stack.enter_context(one)
            yield

    return context
