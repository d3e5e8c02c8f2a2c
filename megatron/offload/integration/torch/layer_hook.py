# SPDX-License-Identifier: Apache-2.0
"""A hook on a layer, for `offload_parameters` and `LayerMajor`: `LayerHook`.

`copy.deepcopy` and `pickle` copy the hooks of a module with it. A copy has nothing to do with where
the parameters of the model wait or how its steps run. The parameters themselves make the copy whole
(`parameters/offloaded_parameter.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.integration.torch.module_hooks import get_do_nothing


class LayerHook:
    """A hook. A copy of its module, also a pickled one, has a hook that does nothing.

    Args:
        function: what the hook does.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    # torch.compile ends its graph before: a graph that began earlier would be called with
    # parameters that are not in their places yet.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        """What the hook does; `torch.compile` ends its graph before it."""
        return self._function(*args)

    def __reduce__(self) -> Any:  # of pickle and of deepcopy
        return get_do_nothing, ()
