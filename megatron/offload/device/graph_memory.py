# SPDX-License-Identifier: Apache-2.0
"""Which memory belongs to the CUDA graphs that `torch.compile` captures: `GraphMemory`.

`torch.compile(mode="reduce-overhead")` keeps the results of its graphs in a pool that each replay
uses anew, and checks that nothing else has happened to it. No one gets memory of it back, and
torch refuses to record a graph while the pool's memory waits for a stream of ours ("Events should
have synchronized when checkpointing block"). So what is in it stays. While a graph is recorded or
its function warms up, nothing else tells this memory from that of other tensors; what a replay
returns is no block of torch's allocator either.

An accelerator's device asks it about each storage that is to move. Reads torch's state, changes
nothing.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

_TREES = "torch._inductor.cudagraph_trees"  # imported where something may capture


class GraphMemory:
    """Knows the memory of the graphs that ran last on a device.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        # A weak reference to the graph that ran last, and the addresses of its results and of those
        # before it: together, for several threads may ask.
        self._last: tuple[Any, frozenset[int]] = (lambda: None), frozenset()

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is a result of a graph that the calling thread has run."""
        trees: Any = sys.modules.get(_TREES)
        if trees is None:
            return False
        manager = trees.get_manager(self._index, create_if_none_exists=False)
        node = None if manager is None else manager.current_node
        if node is None:
            return False
        ran, addresses = self._last
        if ran() is not node:
            addresses = frozenset(one.data_ptr() for one in node.path_live_weakrefs())
            self._last = weakref.ref(node), addresses
        return storage.data_ptr() in addresses
