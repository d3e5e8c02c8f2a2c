# SPDX-License-Identifier: Apache-2.0
"""Ways in which scripts copy a model: `COPIES`."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch


def pickled(model: Any) -> Any:
    """What `pickle` makes of it."""
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    """What `torch.save` makes of it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = (pickled, saved, copy.deepcopy)
