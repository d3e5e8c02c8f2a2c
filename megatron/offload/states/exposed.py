# SPDX-License-Identifier: Apache-2.0
"""A bucket whose tensors are in the optimizer's state between steps: `Exposed`, made by `shown`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from megatron.offload.errors import STATES_PREFIX
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.layout import Name
from megatron.offload.moving.storage import Where
from megatron.offload.sizes import format_size
from megatron.offload.states.lazy_state import LazyStateTensor
from megatron.offload.states.optimizer_places import PARAM
from megatron.offload.states.sharded import as_part_of, local_of
from megatron.offload.states.state_placeholder import is_placeholder

logger = logging.getLogger(__name__)

_Attach = Callable[[Bucket, dict[Name, torch.Tensor]], None]


class Exposed:
    """Puts a bucket's tensors where the optimizer keeps them.

    A script that still holds one of them after the next step sees its bytes from before that step
    if they were on a tier, and from after it if they were in memory.

    Args:
        bucket: no transfer of it is under way.
        optimizer: whose state shows them.
        attach: gives the bucket's parameters their memory.

    Raises:
        OffloadError: another tensor without values is in the place of one.
        OSError: the tier cannot show them, or has other bytes than were written.
    """

    def __init__(
        self,
        bucket: Bucket,
        optimizer: torch.optim.Optimizer,
        attach: _Attach,
    ) -> None:
        assert bucket.layout is not None
        self.bucket = bucket
        away = [  # any other value was assigned by a script, and is the state from now on
            (param, state, index, key)
            for index, param in enumerate(bucket.params)
            for state in [optimizer.state.get(param, {})]
            for key, value in state.items()
            if is_placeholder(value, bucket.layout.slots.get((index, key)))
        ]
        self._views = bucket.layout.views_apart(bucket.view())
        attach(bucket, self._views)
        for param, state, index, key in away:
            state[key] = as_part_of(param, self._views[index, key])
        # Of others it would be asked in vain, and where they wait on a tier that reads them.
        moving = [bucket.params[index] for index, key in self._views if key == PARAM]
        self._data = {param: param.data_ptr() for param in moving}

    def keeps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the bucket has all that was changed meanwhile, also on its tier.

        Raises:
            OffloadError: a tensor without values is in the place of one.
        """
        if self.is_replaced(optimizer):
            return False
        try:
            self.bucket.renew()
        except OSError:
            return False  # the change is only in memory
        return True

    def to_memory(
        self,
        optimizer: torch.optim.Optimizer,
        attach: _Attach,
    ) -> None:
        """Puts copies in ordinary memory in the places of tensors that are shown on a tier.

        For code that reads them next: a read of what is shown would end the process where its drive
        fails.

        Raises:
            OSError: the tier could not read them.
        """
        shown = {} if self.bucket.where is not Where.ON_TIER else self._still_shown(optimizer)
        if not shown:
            return
        assert self.bucket.layout is not None
        views = self.bucket.layout.views(self.bucket.copy_of_view())
        for index, key in shown:
            param = self.bucket.params[index]
            state = optimizer.state.get(param, {})
            if key in state:
                state[key] = as_part_of(param, views[index, key])
        attach(self.bucket, {name: views[name] for name in shown})

    def _still_shown(self, optimizer: torch.optim.Optimizer) -> list[Name]:
        """The names of tensors in whose places no other tensor is.

        Raises:
            OffloadError: a tensor without values is in the place of one.
        """
        found = []
        for (index, key), view in self._views.items():
            param = self.bucket.params[index]
            value = optimizer.state.get(param, {}).get(key, param)
            is_placeholder(value, None)  # raises
            if isinstance(value, torch.Tensor) and _is_same(local_of(value), view):
                found.append((index, key))
        return found

    def is_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether another tensor is in the place of one of them.

        Raises:
            OffloadError: that tensor has no values.
        """
        for (index, key), view in self._views.items():
            shown = optimizer.state.get(self.bucket.params[index], {}).get(key, view)
            shown = shown.value if isinstance(shown, LazyStateTensor) else shown
            is_placeholder(shown, None)  # raises
            if not isinstance(shown, torch.Tensor) or not _is_same(local_of(shown), view):
                return True
        return any(param.data_ptr() != at for param, at in self._data.items())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same memory in the same way."""
    return (
        one.data_ptr() == other.data_ptr()
        and (one.device, one.dtype) == (other.device, other.dtype)
        and (one.shape, one.stride()) == (other.shape, other.stride())
    )


# Buckets that a tier could not show, each with the reason.
Unshown = list[tuple[Bucket, str]]


def shown(
    bucket: Bucket,
    optimizer: torch.optim.Optimizer,
    attach: _Attach,
    bring: Callable[[Bucket], None],
    unshown: Unshown,
) -> Exposed:
    """Shows a bucket; where its tier cannot, in memory.

    Args:
        bucket: see `Exposed`.
        optimizer: likewise.
        attach: likewise.
        bring: brings a bucket to memory.
        unshown: gets the bucket if it is in memory now, for `warn_of`.

    Raises:
        LostStateError: it could not be read.
        OffloadError: another tensor without values is in the place of one.
    """
    try:
        return Exposed(bucket, optimizer, attach)
    except OSError as error:
        reason = str(error)
    bring(bucket)
    unshown.append((bucket, reason))
    return Exposed(bucket, optimizer, attach)


def warn_of(unshown: Unshown) -> None:
    """Says once of all of them that they are in memory, and why."""
    if unshown:
        logger.warning(
            "%s%s cannot be shown on their drive (%s); they are in memory until the next step",
            STATES_PREFIX,
            format_size(sum(bucket.num_bytes for bucket, _ in unshown)),
            unshown[0][1],
        )
