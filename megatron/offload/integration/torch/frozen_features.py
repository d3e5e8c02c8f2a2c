# SPDX-License-Identifier: Apache-2.0
"""Frozen parts of a model, computed once: `cache_frozen`, one line in a training script.

It finds the parts (`frozen_modules.py`), opens the directory (`frozen/store.py`) and takes the
place of the parts' `forward` (`frozen_part.py`) until the handle is closed.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.activations.saved.quantization import INT8
from megatron.offload.directories import resolved_directory
from megatron.offload.errors import FEATURES_PREFIX, ConfigurationError
from megatron.offload.frozen.digests import digest_of, row_digests
from megatron.offload.frozen.store import FeatureStore
from megatron.offload.integration.open_streams import OPEN, Handle
from megatron.offload.integration.replaced_forwards import ReplacedForwards
from megatron.offload.integration.torch.frozen_modules import ask_for_gradients, frozen_modules
from megatron.offload.integration.torch.frozen_part import FrozenPart
from megatron.offload.integration.torch.ranks import local_world_size
from megatron.offload.sizes import format_size, parse_positive_size
from megatron.offload.values import parse_path, parse_threads

logger = logging.getLogger(__name__)

_Batch = TypeVar("_Batch")
_END: Any = object()
_CODECS = {"off": None, "int8": INT8}


class FrozenFeatures(Handle):
    """What `cache_frozen` returns: the parts of a model whose results are stored.

    Attributes:
        parts: in the order of the model's modules.
        store: the directory.
    """

    def __init__(self, parts: list[FrozenPart], store: FeatureStore) -> None:
        self.parts, self.store = parts, store
        self._forwards = ReplacedForwards([call for part in parts for call in part.calls])
        self._forwards.connect()
        self._keys: dict[bytes, list[bytes]] = {}  # of rows of a batch, for `ahead`
        self._num_epochs = 0
        self._before = (0, 0)  # hits and computed rows when the epoch began
        self._is_open = True
        OPEN.frozen.add(self)

    @property
    def modules(self) -> set[torch.nn.Module]:
        """Whose `forward` is replaced."""
        return {call.module for part in self.parts for call in part.calls}

    @property
    def statistics(self) -> dict[str, int]:
        """Since the beginning: rows found and computed, bytes stored and read by this process."""
        return {
            "hit_rows": sum(part.hit_rows for part in self.parts),
            "computed_rows": sum(part.computed_rows for part in self.parts),
            "stored_bytes": self.store.stored_bytes,
            "read_bytes": self.store.read_bytes,
            "not_stored_rows": self.store.num_not_stored,
        }

    def report(self) -> str:
        """A line for people."""
        found = self.statistics
        names = "; ".join(
            f"{part.name} (computed: {part.why_not})" if part.why_not else part.name
            for part in self.parts
        )
        return (
            f"{FEATURES_PREFIX}{names}: {found['hit_rows']} rows found, {found['computed_rows']} "
            f"computed; stored {format_size(found['stored_bytes'])}, read "
            f"{format_size(found['read_bytes'])} in {self.store.directory}"
        )

    def end_epoch(self) -> None:
        """Says so if all rows of an epoch but the first were computed: they may never come again.

        The callbacks of trainers and `ahead` call it.
        """
        hits, computed = (self.statistics[name] for name in ("hit_rows", "computed_rows"))
        before_hits, before_computed = self._before
        self._before = (hits, computed)
        self._num_epochs += 1
        if self._num_epochs > 1 and hits == before_hits and computed > before_computed:
            logger.warning(
                "%san epoch has ended in which none of %d rows was found: inputs that are "
                "augmented, or padded to another length in each epoch, or in a batch of another "
                "size, are other inputs; leave them as they are, or leave out the cache",
                FEATURES_PREFIX,
                computed - before_computed,
            )

    def ahead(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Gives the batches of a loader, and reads what is stored of the next one meanwhile.

            for batch in features.ahead(loader):

        From its second epoch on it knows which rows of a batch came to which results. Batches are
        tensors on the CPU, in dicts, lists and tuples, whose first dimension is that of the rows.
        """
        batches = iter(loader)
        following = next(batches, _END)
        keys: list[bytes] = []
        while following is not _END:
            batch, rows = following, _rows_of(following)
            for part in self.parts:
                part.used = []
            following = next(batches, _END)
            next_keys = self._known(following)
            self.store.read_ahead([*keys, *next_keys])
            yield batch
            self._learn(rows)
            keys = next_keys
        self.end_epoch()

    def close(self) -> None:
        """Leaves the model as it was; the files stay, and what is on its way is stored."""
        if self._is_open:
            self._is_open = False
            OPEN.frozen.discard(self)
            self._forwards.close()
            self.store.close()

    def _known(self, batch: Any) -> list[bytes]:
        if batch is _END or not self._keys:
            return []
        return [key for row in _rows_of(batch) for key in self._keys.get(row, ())]

    def _learn(self, rows: list[bytes]) -> None:
        found: list[list[bytes]] = [[] for _ in rows]
        for part in self.parts:
            for keys in part.used or ():
                if len(keys) == len(rows):
                    for row, key in zip(found, keys, strict=True):
                        row.append(key)
            part.used = None
        self._keys.update(zip(rows, found, strict=True))


def cache_frozen(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    budget_bytes: int | str | None = None,
    threads: int | None = None,
    codec: Literal["off", "int8"] = "off",
) -> FrozenFeatures:
    """Computes the frozen parts of a model once and reads their results from then on.

        cache_frozen(model, "/mnt/nvme0/features")

    Parts are the largest submodules without trainable weights whose inputs want no gradient: the
    layers before the first trainable one, a vision tower, a text encoder, a reference model. What
    they compute of each row of a batch is stored under a key of all that goes into it: the row's
    tensors, the bytes of the frozen weights, shapes, types, versions. A row that comes again is
    read, and the part is skipped if all rows of the batch are there. Losses and weights stay the
    same, bit for bit. The files outlive the run, and the ranks of a node may share them.

    Args:
        model: plain or wrapped, its weights frozen already (`requires_grad_(False)`).
        directory: an existing directory on an SSD, for nothing else.
        budget_bytes: most that its files may take, `"200GiB"`. Default: until the disk is full.
            What does not fit is computed.
        threads: for I/O.
        codec: `int8`: results in floating point are rounded to 8 bits a value, in groups of 128,
            and take a half or a quarter of the bytes. Losses and gradients are then approximate;
            they do not depend on whether a row was there. `off`: all is exact.

    Returns:
        A handle with `statistics`, `report()`, `ahead(loader)` and `close()`, also a context
        manager.

    Raises:
        ConfigurationError: the model has no frozen part, there is no such codec, or the directory
            cannot be used. A forward pass raises it for a part that draws random numbers or changes
            its buffers.
        OSError: the directory cannot be read.
    """
    budget = None if budget_bytes is None else parse_positive_size(budget_bytes)
    number = None if threads is None else parse_threads(threads)
    if codec not in _CODECS:
        raise ConfigurationError(
            f"{FEATURES_PREFIX}there is no codec {codec!r} for them; give codec='int8', or leave "
            "it out to keep them exact"
        )
    found = frozen_modules(model)
    chosen = {module for part in found for _, module in part}
    for other in OPEN.frozen:
        if other.modules & chosen:
            raise ConfigurationError(
                f"{FEATURES_PREFIX}{type(model).__name__} has a cache already; close() its handle"
            )
    path = resolved_directory(parse_path(directory), FEATURES_PREFIX, "directory")
    store = FeatureStore(path, budget, number, local_world_size())
    asks = functools.partial(ask_for_gradients, model)
    parts = [FrozenPart(part, store, asks, _CODECS[codec]) for part in found]
    return FrozenFeatures(parts, store)


def _rows_of(batch: Any) -> list[bytes]:
    """A digest of each row of a batch; none: its rows cannot be told."""
    leaves = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
    sizes = {len(one) if one.dim() else -1 for one in leaves}
    if len(sizes) != 1 or any(one.device.type != "cpu" for one in leaves):
        return []
    (num_rows,) = sizes
    if num_rows < 1:
        return []
    size = str(num_rows).encode()
    each = zip(*(row_digests(one, num_rows, by_rows=True) for one in leaves), strict=True)
    return [digest_of(size, *digests) for digests in each]
