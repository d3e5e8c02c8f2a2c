# SPDX-License-Identifier: Apache-2.0
"""Arguments and results as JSON: what comes back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron.offload.frozen.digests import digest_of, row_digests
from megatron.offload.frozen.structure import UnknownValueError, flatten, unflatten

A, B = torch.arange(3), torch.zeros(2, 2)


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, None, [B, 1, 2.5, "x", True], {"a": A, "b": (B,)}),
        {"tensor": 0},  # is no tensor
        (),
    ],
)
def test_a_value_comes_back_through_json(value: Any) -> None:
    leaves: list[torch.Tensor] = []
    spec = flatten(value, leaves)
    made = unflatten(json.loads(json.dumps(spec)), leaves)
    assert type(made) is type(value)
    assert str(made) == str(value)


def test_an_output_of_transformers_comes_back() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=A, hidden_states=(A, B))
    leaves: list[torch.Tensor] = []
    spec = json.loads(json.dumps(flatten(value, leaves)))
    made = unflatten(spec, leaves)
    assert type(made) is type(value) and made.keys() == value.keys()
    assert made.hidden_states[1] is B


@pytest.mark.parametrize("value", [object(), {1: A}, {"a": {A}}, [lambda: None]])
def test_a_value_whose_contents_cannot_be_told_is_refused(value: Any) -> None:
    with pytest.raises(UnknownValueError):
        flatten(value, [])


def test_a_file_makes_no_class_that_is_no_output() -> None:
    for module, name in (("subprocess", "Popen"), ("not_imported", "Output")):
        with pytest.raises(UnknownValueError):
            unflatten({"of": [module, name], "fields": [["args", "true"]]}, [])


def test_digests_are_of_rows_and_of_their_bits() -> None:
    tensor = torch.tensor([[0.0, 1.0], [0.0, 1.0], [-0.0, 1.0]], dtype=torch.bfloat16)
    first, second, third = row_digests(tensor, 3, by_rows=True)
    assert first == second != third
    assert row_digests(tensor.t(), 3, by_rows=False)[0] != row_digests(tensor, 3, by_rows=False)[0]
    assert len(set(row_digests(tensor, 3, by_rows=False))) == 1


def test_digests_tell_where_a_part_ends() -> None:
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc")
