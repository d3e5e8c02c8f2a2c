# SPDX-License-Identifier: Apache-2.0
"""Large tensors that others make on their way to a checkpoint: in files, and the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.offload.states.in_files import InFiles

NUMBER = 1 << 12  # of values that are large here
LARGE_BYTES = 4 * NUMBER


def is_in_a_file(tensor: torch.Tensor, directory: Path) -> bool:
    """Whether its memory is mapped from a file below a directory."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= at < end:
            return line.split(maxsplit=5)[-1].startswith(str(directory))
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize(
    "make",
    [
        lambda one: torch.zeros(one.shape),
        lambda one: torch.empty(one.shape).copy_(one),
        torch.clone,
        lambda one: one.clone(),
        lambda one: torch.cat([one[: NUMBER // 2], one[NUMBER // 2 :]]),
    ],
    ids=["zeros", "empty", "torch.clone", "clone", "cat"],
)
def test_a_large_tensor_is_in_a_file_and_the_same(
    make: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    one = torch.randn(NUMBER)
    expected = make(one)
    with InFiles([tmp_path], LARGE_BYTES):
        made, small = make(one), make(one[: NUMBER // 2])
    assert is_in_a_file(made, tmp_path) and not is_in_a_file(small, tmp_path)
    assert torch.equal(made, expected) and made.stride() == expected.stride()
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert not list(tmp_path.iterdir())  # files have no names
    made.add_(1)
    assert torch.equal(made, expected + 1)


def test_what_has_a_gradient_or_another_place_is_left_alone(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(NUMBER))
    with InFiles([tmp_path], LARGE_BYTES):
        made = [weight.clone(), weight.detach().cpu(), torch.zeros(NUMBER, out=torch.empty(0))]
        away = torch.zeros(NUMBER, device="meta")
    assert made[0].requires_grad and made[1].data_ptr() == weight.data_ptr()
    assert not any(is_in_a_file(one.detach(), tmp_path) for one in made)
    assert away.device.type == "meta"


def test_without_room_for_files_tensors_are_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with InFiles([tmp_path / "gone"], LARGE_BYTES):
        made = torch.zeros(NUMBER)
    assert made.eq(0).all() and not is_in_a_file(made, tmp_path)
    assert "on their way to a checkpoint are in memory" in caplog.text
