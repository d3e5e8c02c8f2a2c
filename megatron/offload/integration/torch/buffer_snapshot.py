# SPDX-License-Identifier: Apache-2.0
"""The buffers that a layer changes in its forward, as they were before: `BufferSnapshot`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron.offload.activations.saved.tensor_kind import kind_of
from megatron.offload.errors import ChangedInPlaceError
from megatron.offload.integration.torch.noted_tensor import SMALL_BYTES, version_of

_ODD = 0x1E3779B97F4A7C15  # products with odd numbers lose no bits


class BufferSnapshot:
    """What a layer's buffers held when this was made, for when its forward runs again.

    Running statistics (a batch norm's), counters and power iterations (a spectral norm's) change
    once for each forward pass, and what they held has a part in the result. So a forward that runs
    again gets copies of its own: it starts with what the first one has found, changes nothing that
    later passes need, and what backward saves of these stays as it is. A buffer that it has left
    alone is the same one when it runs again, also if others have put another in its place since
    (`functional_call` does). If others have changed it in place, it gets a copy of what it has
    found, as long as the buffer is small. Of large ones no copies are kept, but a fingerprint: data
    parallelism writes the same values into buffers again before each forward pass. Torch does not
    compare all kinds of tensors (sparse and nested ones, for instance): of these there are copies.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        places = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        copies = {buffer: buffer.detach().clone() for _, _, buffer in places}  # one may be shared
        self._before = [(*place, copies[place[-1]]) for place in places]
        # And left alone: with its version, and a copy of a small one or a fingerprint.
        self._same: list[tuple[dict[str, Any], str, torch.Tensor, int, torch.Tensor]] = []

    def keep_changed(self) -> None:
        """That forward has ended: lets go of copies that are not needed. Waits for the device."""
        before, self._before = self._before, []
        for owner, name, buffer, copy in before:
            if not _is_plain(buffer) or not torch.equal(buffer, copy):
                self._before.append((owner, name, buffer, copy))
            else:
                kept = copy if _is_small(copy) else fingerprint_of(copy)
                self._same.append((owner, name, buffer, version_of(buffer), kept))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the layer has copies of what its buffers held before.

        Raises:
            ChangedInPlaceError: others have changed a large one in place.
        """
        copies = {copy: copy.clone() for *_, copy in self._before}
        places = [(owner, name) for owner, name, *_ in self._before]
        places += [(owner, name) for owner, name, *_ in self._same]
        present = [(owner, name, owner.get(name)) for owner, name in places]
        found = [
            (owner, name, same if version_of(same) == version else _found(name, same, kept))
            for owner, name, same, version, kept in self._same
        ]
        found += [(owner, name, copies[copy]) for owner, name, _, copy in self._before]
        for owner, name, one in found:
            owner[name] = one
        try:
            yield
        finally:
            for owner, name, buffer in present:
                owner[name] = buffer


def _found(name: str, buffer: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """What a buffer held that was written to."""
    if _is_small(buffer):
        return kept
    if not torch.equal(fingerprint_of(buffer), kept):
        raise ChangedInPlaceError(
            f"a buffer, {name}, of a layer that is to be recomputed was changed in place since the "
            "layer ran; change it after the backward pass, put a new tensor there, or do not "
            "recompute the layer"
        )
    return buffer


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.nbytes <= SMALL_BYTES


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether its bytes are all that it is, so that they can be compared."""
    return type(buffer) is torch.Tensor and kind_of(buffer).is_all_bytes


def fingerprint_of(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums over all bytes, one of which goes by their places."""
    as_bytes = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = torch.nn.functional.pad(as_bytes, (0, -as_bytes.numel() % 8)).view(torch.int64)
    places = torch.arange(words.numel(), device=words.device).mul_(2).add_(1).mul_(_ODD)
    return torch.stack([words.sum(), words.mul(places).sum()])
