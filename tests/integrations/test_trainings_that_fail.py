# SPDX-License-Identifier: Apache-2.0
"""Trainings that an error ends: what is said beside its traceback, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations
from tests.support.loops import Net, net, noise
from tests.support.processes import finish, start_python


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in backward")


def before_the_model(model: Net) -> None:
    raise RuntimeError("in the data")


def in_its_first_layer(model: Net) -> None:
    model(torch.randn(3, 7))


def in_a_later_layer(model: Net) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.blocks[1], "forward", lambda x: x @ x)
        model(torch.randn(3, 5, 32))


def in_the_loss(model: Net) -> None:
    torch.nn.functional.l1_loss(model(noise()).flatten(), torch.zeros(7, 9))


def in_backward(model: Net) -> None:
    _FailsInBackward.apply(model(noise())).sum().backward()


FAILURES = (before_the_model, in_its_first_layer, in_a_later_layer, in_the_loss, in_backward)


def warnings(caplog: Any) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("fail", FAILURES, ids=lambda one: str(one.__name__))
def test_a_first_pass_that_failed_says_nothing_of_what_did_not_move(
    fail: Callable[[Net], None], tmp_path: Path, caplog: Any
) -> None:
    model = net()
    with pytest.raises(RuntimeError), offload_activations(model, tmp_path):
        fail(model)
    assert warnings(caplog) == []


@pytest.mark.parametrize("fail", [in_its_first_layer, in_backward], ids=lambda one: one.__name__)
def test_a_first_pass_that_failed_leaves_the_warning_to_the_next(
    fail: Callable[[Net], None], tmp_path: Path, caplog: Any
) -> None:
    model = net()
    with offload_activations(model, tmp_path):
        with pytest.raises(RuntimeError):
            fail(model)
        assert warnings(caplog) == []
        model(noise()).sum().backward()
    (said,) = warnings(caplog)
    assert "no saved storage has 1 MiB or more" in said


def test_a_script_that_fails_ends_with_its_own_traceback(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from megatron.offload import offload_activations
        from tests.support.loops import net, noise
        model = net()
        offload_activations(model, sys.argv[1])
        {}
        model(torch.randn(3, 7))
    """

    def said(line: str) -> str:
        return finish(start_python(script.format(line), tmp_path))[2]

    for line in ("", "raise ValueError('x')"):
        assert "offload:" not in said(line)
    assert "no forward pass with gradients was seen" in said("sys.exit()")


def test_auto_goes_on_after_a_first_pass_that_reached_no_layer(tmp_path: Path) -> None:
    """As of a batch that is too large, whose error a trainer takes for a reason to halve it."""

    class Embedded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 32)
            self.net = net()

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.net(self.embedding(words))

    model = Embedded()
    with offload_activations(model, tmp_path, mode="auto", min_bytes=1) as offload:
        with pytest.raises(IndexError):
            model(torch.full((2, 16), 11))
        for _ in range(5):
            model(torch.ones(2, 16, dtype=torch.long)).sum().backward()
        assert offload.statistics["plans"] == 1
