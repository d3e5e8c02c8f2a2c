# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of modules as JSON and a list of tensors: `flatten`, `unflatten`.

The JSON of arguments is part of a key, that of results is in the files. No file names a class that
is made unless the process has imported it already and it is a dict of fields: reading a file runs
no code of others.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)

Special = Callable[[Any], Any]


class UnknownValueError(TypeError):
    """A value whose contents cannot be told; the message is the name of its type."""


def flatten(value: Any, leaves: list[torch.Tensor], special: Special | None = None) -> Any:
    """The JSON of a value, with `{"tensor": INDEX}` for each tensor.

    Args:
        value: tensors, numbers, text, and tuples, lists, dicts and model outputs of them.
        leaves: its tensors are added here.
        special: asked first; gives the JSON of a value, or None.

    Raises:
        UnknownValueError: something else is in it.
    """
    if special is not None and (known := special(value)) is not None:
        return known
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if type(value) in (tuple, list):
        return {type(value).__name__: [flatten(one, leaves, special) for one in value]}
    if type(value) is dict or _is_output(type(value)):
        items = [[_text(key), flatten(one, leaves, special)] for key, one in value.items()]
        if type(value) is dict:
            return {"dict": items}
        return {"of": [type(value).__module__, type(value).__qualname__], "fields": items}
    if isinstance(value, _NAMED):
        return {"named": str(value)}
    raise UnknownValueError(type(value).__name__)


def unflatten(spec: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """The value that `flatten` was given, with these tensors in it.

    Raises:
        UnknownValueError: it has what only arguments may have, or a class that is not imported.
    """
    if not isinstance(spec, Mapping):
        return spec
    if "tensor" in spec:
        return leaves[spec["tensor"]]
    if "tuple" in spec:
        return tuple(unflatten(one, leaves) for one in spec["tuple"])
    if "list" in spec:
        return [unflatten(one, leaves) for one in spec["list"]]
    if "dict" in spec:
        return {name: unflatten(one, leaves) for name, one in spec["dict"]}
    if "of" in spec:
        module, name = spec["of"]
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and _is_output(kind):
            return kind(**{field: unflatten(one, leaves) for field, one in spec["fields"]})
        raise UnknownValueError(name)
    raise UnknownValueError("value of unknown type")


def _is_output(kind: type) -> bool:
    """Whether it is a dict of fields, as the outputs of transformers' and diffusers' models are."""
    return issubclass(kind, dict) and dataclasses.is_dataclass(kind)


def _text(key: Any) -> str:
    if type(key) is not str:
        raise UnknownValueError(f"dict with a {type(key).__name__} as a key")
    return key
