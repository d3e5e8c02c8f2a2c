# SPDX-License-Identifier: Apache-2.0
"""A bucket whose tensors everybody sees: `Exposed`, between steps, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.offload.states.bucket import Bucket
from megatron.offload.states.layout import Name


class Exposed:
    """Has put a bucket's tensors where the optimizer keeps them.

    Args:
        bucket: no write of it is under way.
        optimizer: whose state shows them.
        attach: gives the bucket's parameters their memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        optimizer: torch.optim.Optimizer,
        attach: Callable[[Bucket, dict[Name, torch.Tensor]], None],
    ) -> None:
        assert bucket.layout is not None
        self.bucket = bucket
        self._storage = bucket.storage or bucket.block.tier.view(bucket.block)
        self._views = bucket.layout.views(self._storage)
        self._versions = {name: view._version for name, view in self._views.items()}
        attach(bucket, self._views)
        for index, param in enumerate(bucket.params):
            state = optimizer.state.get(param, {})
            for key in state:
                state[key] = self._views.get((index, key), state[key])
        self._data = {param: param.data_ptr() for param in bucket.params}

    def is_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a tensor was changed in place, or replaced."""
        for (index, key), view in self._views.items():
            param = self.bucket.params[index]
            shown = optimizer.state.get(param, {}).get(key, view)
            if view._version != self._versions[index, key] or shown is not view:
                return True
        return any(param.data_ptr() != at for param, at in self._data.items())
