# SPDX-License-Identifier: Apache-2.0
"""The parameters of a unit of layers, which come and go together: `ParameterUnit`.

Note [Memory that stays where it is]
What autograd saves of a weight in forward it wants in backward, and by then the weight has been
away. So a unit's parameters have addresses of their own for good, and only the memory behind them
comes and goes. Saved views hold the addresses, never the bytes. While a unit is away, whoever looks
at one of its parameters finds NaN: never bytes of before, and never zeros.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from megatron.offload.states.layout import Layout
from megatron.offload.tiers.mapped import Pages
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer

_KEY = "param"  # in the names of a layout


class Where(enum.Enum):
    """Where a unit's parameters are. Members name the transitions into them."""

    IN_MEMORY = "in memory"  # at first; their read has ended; their write failed or was taken back
    WRITING = "being written"  # put_away from IN_MEMORY, changed since they were last written
    AWAY = "on a tier"  # the write has ended well; or put_away, unchanged
    READING = "being read"  # begin_read from AWAY


class ParameterUnit:
    """Some parameters in one piece of memory, which have a block on a tier unless they changed.

    Args:
        name: of the unit, for people.
        params: on the CPU; they get new memory, with the same bytes.
    """

    def __init__(self, name: str, params: Sequence[torch.nn.Parameter]) -> None:
        self.name = name
        self.params = list(params)
        self.where = Where.IN_MEMORY
        self.write_error: BaseException | None = None  # of the last write that failed
        self._layout = Layout({(i, _KEY): p.detach() for i, p in enumerate(self.params)})
        self.num_bytes = self._layout.num_bytes
        self._pages = Pages(self.num_bytes)
        views = self._layout.views(self._pages.storage)
        self._views = [views[i, _KEY] for i in range(len(self.params))]
        self.block: Any = None  # has their bytes; None: they have changed since
        self._transfer: Transfer | None = None
        # Protects what the end of a write changes, and tells of it.
        self._lock = threading.Condition()
        for param, view in zip(self.params, self._views, strict=True):
            view.copy_(param.detach())
            param.data = view

    # -- To a tier ------------------------------------------------------------------------------

    def put_away(self, tiers: Sequence[Tier]) -> bool:
        """Lets the memory go, once a tier has the bytes; whether one has, or takes them.

        Args:
            tiers: the first that takes them has them.
        """
        if self.where is Where.READING:  # nobody wants them any more
            transfer, self._transfer = self._transfer, None
            assert transfer is not None
            transfer.cancel()
            with contextlib.suppress(BaseException):
                transfer.wait()
            self.where = Where.AWAY
            self._pages.release()
        if self.where is not Where.IN_MEMORY:
            return True
        if self.block is not None:
            self._detach()
            self.where = Where.AWAY
            self._pages.release()
            return True
        for tier in tiers:
            started = tier.begin_write(self._pages.storage)
            if started is not None:
                self._detach()
                self.block, transfer = started
                with self._lock:
                    self.where, self._transfer = Where.WRITING, transfer
                transfer.add_done_callback(self._write_ended)
                return True
        return False

    # Runs in an I/O thread.
    def _write_ended(self, transfer: Future[None]) -> None:
        with self._lock:
            if self._transfer is not transfer:
                return  # taken back meanwhile
            self._transfer = None
            if transfer.cancelled() or (error := transfer.exception()) is not None:
                self.where, self.block = Where.IN_MEMORY, None
                self.write_error = None if transfer.cancelled() else error
            else:
                self.where = Where.AWAY
                self._pages.release()
            self._lock.notify_all()

    def wait_for_write(self) -> None:
        """Blocks until no write is under way, well or badly."""
        with self._lock:
            self._lock.wait_for(lambda: self.where is not Where.WRITING)

    def take_back(self) -> None:
        """Its parameters are needed: a write under way is given up."""
        with self._lock:
            if self.where is not Where.WRITING:
                return
            transfer, self._transfer = self._transfer, None
            self.where, self.block = Where.IN_MEMORY, None
        assert transfer is not None
        transfer.cancel()

    # -- And back -------------------------------------------------------------------------------

    def begin_read(self) -> None:
        """Starts to bring them back, if they are away."""
        if self.where is Where.AWAY:
            into = self._pages.storage
            _, self._transfer = self.block.tier.begin_read(self.block, into=into)
            self.where = Where.READING

    def bring(self) -> None:
        """Has them in memory and in their places.

        Raises:
            OSError: they could not be read; they are still away.
        """
        self.take_back()
        self.begin_read()
        if self.where is Where.READING:
            transfer, self._transfer = self._transfer, None
            assert transfer is not None
            try:
                transfer.wait()
            except BaseException:
                self.where = Where.AWAY
                self._pages.release()
                raise
            self.where = Where.IN_MEMORY
        self._attach()

    def note_change(self) -> None:
        """They have other bytes from now on than their block; they are in memory."""
        assert self.where is Where.IN_MEMORY, self.where
        self.block = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes now."""
        return 0 if self.where is Where.AWAY else self.num_bytes

    # -- For whoever looks between steps --------------------------------------------------------

    def show(self) -> None:
        """Puts them in their places wherever they are: what is on a tier is mapped there.

        Raises:
            OSError: the tier cannot show them, or has other bytes.
        """
        if self.where in (Where.IN_MEMORY, Where.WRITING, Where.READING):
            self.bring()
            return
        views = self._layout.views(self.block.tier.view(self.block))
        for index, param in enumerate(self.params):
            param.data = views[index, _KEY]

    def versions(self) -> list[tuple[int, int]]:
        """Change when a parameter is changed or replaced, as far as autograd sees it."""
        return [(param._version, param.data_ptr()) for param in self.params]

    def adopt(self) -> None:
        """Takes over what the parameters hold now, wherever that is."""
        values = [param.detach() for param in self.params]
        self.take_back()
        self.where, self.block = Where.IN_MEMORY, None
        for view, value in zip(self._views, values, strict=True):
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
        self._attach()

    def hide(self) -> None:
        """Ends `show` of what is away: NaN again."""
        if self.where is Where.AWAY:
            self._detach()

    def give_back(self) -> None:
        """Gives parameters memory of their own again, as they had before."""
        for param in self.params:
            param.data = param.detach().clone()

    def _attach(self) -> None:
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view

    def _detach(self) -> None:
        for param in self.params:
            nothing = torch.full((), float("nan"), dtype=param.dtype)
            param.data = nothing.expand(param.shape)
