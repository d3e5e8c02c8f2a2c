# SPDX-License-Identifier: Apache-2.0
"""The buffers that a layer changes in its forward, as they were before: `BufferSnapshot`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class BufferSnapshot:
    """What a layer's buffers held when this was made, for when its forward runs again.

    Running statistics (a batch norm's), counters and power iterations (a spectral norm's) change
    once for each forward pass, and what they held has a part in the result. So a forward that runs
    again gets copies of its own: it starts with what the first one has found, changes nothing that
    later passes need, and what backward saves of these stays as it is. A buffer that it has left
    alone is the same one when it runs again, also if others have put another in its place since
    (`functional_call` does).
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        places = [
            (module._buffers, name, buffer)
            for module in layer.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        copies = {buffer: buffer.detach().clone() for _, _, buffer in places}  # one may be shared
        self._before = [(*place, copies[place[-1]]) for place in places]
        self._same: list[tuple[dict[str, Any], str, torch.Tensor]] = []  # and left alone

    def keep_changed(self) -> None:
        """That forward has ended: lets go of copies that are not needed. Waits for the device."""
        before, self._before = self._before, []
        for owner, name, buffer, copy in before:
            if owner.get(name) is not buffer or not torch.equal(buffer, copy):
                self._before.append((owner, name, buffer, copy))
            else:
                self._same.append((owner, name, buffer))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the layer has copies of what its buffers held before."""
        copies = {copy: copy.clone() for *_, copy in self._before}
        places = [(owner, name) for owner, name, *_ in self._before]
        places += [(owner, name) for owner, name, _ in self._same]
        present = [(owner, name, owner.get(name)) for owner, name in places]
        for owner, name, _, copy in self._before:
            owner[name] = copies[copy]
        for owner, name, same in self._same:
            owner[name] = same
        try:
            yield
        finally:
            for owner, name, buffer in present:
                owner[name] = buffer
