# SPDX-License-Identifier: Apache-2.0
"""A codec for what a compiled graph saves: the same losses, nearly the same gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations
from megatron.offload.integration.torch import compiled_graphs
from tests.support.compiled import (
    HIDDEN,
    STEPS,
    Stack,
    Trained,
    assert_same,
    batch,
    trained,
    without_offload,
)

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
DIVIDED = "aot_eager_decomp_partition"  # divided as for inductor, of the same operations
TOKENS, VOCABULARY = 24, 40


pytestmark = pytest.mark.usefixtures("compiled_anew")


class Attention(torch.nn.Module):
    """Scores with a mask of the least number, angles of a product, logits and a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.register_buffer("frequencies", torch.rand(1, HIDDEN, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        places = torch.arange(x.shape[1], dtype=x.dtype)[None, None]
        angles = (self.frequencies @ places).transpose(1, 2)  # type: ignore[operator]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = (one * angles.cos() for one in (q, k))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = q @ k.transpose(1, 2) / 8
        scores = scores + later * torch.finfo(x.dtype).min
        x = x + scores.softmax(-1) @ v
        x = x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        logits = self.head(x).flatten(0, 1)
        answers = torch.arange(len(logits)) % VOCABULARY
        return torch.nn.functional.cross_entropy(logits, answers)


def difference(one: Trained, other: Trained) -> float:
    """The relative difference of all gradients together."""
    ours, theirs = (
        torch.cat([tensor.double().flatten() for tensor in results if tensor.dim()])
        for results, _ in (one, other)
    )
    return float((ours - theirs).norm() / theirs.norm())


def losses(found: Trained) -> list[torch.Tensor]:
    return [one for one in found[0] if not one.dim()]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("aot_eager", Stack),
        (DIVIDED, Attention),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("aot_eager", Attention), (DIVIDED, Stack))
        ),
        pytest.param("inductor", Stack, marks=pytest.mark.rare),
        pytest.param("inductor", Attention, marks=pytest.mark.slow),
    ],
)
def test_losses_are_the_same_and_gradients_nearly(kind: Any, backend: str, tmp_path: Path) -> None:
    run = functools.partial(trained, backend=backend, kind=kind, lengths=(TOKENS,) * STEPS)
    exact = run(tmp_path)
    torch.compiler.reset()
    found = run(tmp_path, codec="int8")
    assert len(losses(found)) == STEPS and all(map(torch.equal, losses(found), losses(exact)))
    assert 0 < difference(found, exact) < 0.02
    for with_codec, without in zip(found[1], exact[1], strict=True):
        encoded_bytes = with_codec["encoded_bytes"]
        assert encoded_bytes > 0.4 * without["offloaded_bytes"]
        spared = without["offloaded_bytes"] - with_codec["offloaded_bytes"]
        assert 32 * (1 - spared / encoded_bytes) == pytest.approx(8.125, rel=0.01)


class Divided(Stack):
    """Its loss divides by a product that it makes itself: much of that is small beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.divisor = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x.sin() / (self.divisor(x).abs() + 1e-3)).mean()


@pytest.mark.parametrize("backend", ["aot_eager", DIVIDED])
def test_what_a_loss_divides_by_stays_exact(backend: str, tmp_path: Path) -> None:
    """As in eager: a small value beside a large one would be zero."""
    ours = trained(tmp_path, backend, kind=Divided, mode="keep", codec="int8")
    theirs = trained(None, backend, kind=Divided)
    assert ours[1][-1]["encoded_bytes"] > 0
    assert 0 < difference(ours, theirs) < 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_same_wherever_bytes_were(backend: str, tmp_path: Path) -> None:
    """In memory, in host memory, on a drive that is slow or done; twice the same."""
    run = functools.partial(trained, tmp_path, backend, kind=Attention, codec="int8")
    expected = run()
    for settings in (
        {"settled": True},
        {"mode": "keep"},
        {"mode": "host", "host_budget": "1GiB", "settled": True},
        {"write_bytes_per_s": "100KB/s"},  # most is needed before it is written
        {"mode": "tiered", "host_budget": "64KiB"},
        {"replay": "off"},
    ):
        assert_same(run(**settings), expected)


@pytest.mark.parametrize("backend", ["aot_eager", DIVIDED])  # inductor's may come from its cache
def test_scores_logits_and_tables_stay_exact(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what softmax and cross entropy make of them; the residual stream does not."""
    written: list[tuple[tuple[int, ...], bool]] = []

    def noted(forward: torch.fx.GraphModule, *others: Any) -> None:
        rewrite(forward, *others)
        for one in forward.graph.nodes:
            if "begin_write" in str(one.target):
                saved, *_, rounds = one.args
                written.append((tuple(saved.meta["val"].shape), rounds))

    rewrite = compiled_graphs.rewrite
    monkeypatch.setattr(compiled_graphs, "rewrite", noted)
    trained(tmp_path, backend, kind=Attention, lengths=(TOKENS,) * STEPS, codec="int8", min_bytes=1)
    rounded = {shape for shape, rounds in written if rounds}
    exact = {shape for shape, rounds in written if not rounds}
    assert any(shape[-1] == HIDDEN and shape[-2] in (TOKENS, 2 * TOKENS) for shape in rounded)
    assert any(shape[-1] == 4 * HIDDEN for shape in rounded)
    for shape in rounded:
        assert shape[-2:] != (TOKENS, TOKENS) and VOCABULARY not in shape and 1 not in shape, shape
    assert (2, TOKENS, TOKENS) in exact
    assert any(VOCABULARY in shape for shape in exact)


def test_a_retained_graph_gives_the_same_again(tmp_path: Path) -> None:
    model = Attention()
    compiled: Any = torch.compile(model, backend="aot_eager")
    settings: dict[str, Any] = {"min_bytes": 1024, "inside_graphs": True, "codec": "int8"}
    with offload_activations(model, tmp_path, **settings) as offload:
        loss = compiled(batch(0))
        found = []
        for retain_graph in (True, True, False):
            loss.backward(retain_graph=retain_graph)
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
        assert offload.statistics["encoded_bytes"] > 0
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_frozen_part_is_not_rounded(tmp_path: Path) -> None:
    """What no input with a gradient goes into."""

    def frozen() -> Attention:
        model = Attention()
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        return model

    found = trained(tmp_path, kind=frozen, codec="int8")
    torch.compiler.reset()
    assert_same(found, trained(None, kind=frozen))
    assert all(step["encoded_bytes"] == 0 for step in found[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_chooses_what_is_rounded(backend: str, tmp_path: Path) -> None:
    """One for which everything fits rounds nothing."""
    settings: dict[str, Any] = {"mode": "auto", "codec": "int8", "lengths": (32,) * 5}
    found = trained(tmp_path, backend, memory_budget_bytes="1GiB", **settings)
    assert [step["plans"] for step in found[1]] == [0, 0, 0, 1, 1]
    assert found[1][0]["encoded_bytes"] > 0 and found[1][-1]["encoded_bytes"] == 0
    exact = without_offload(5, backend)
    assert all(map(torch.equal, losses(found), losses(exact)))
    last = slice(-len(found[0]) // 5, None)
    assert all(map(torch.equal, found[0][last], exact[0][last]))


def test_four_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="use int8 with inside_graphs"):
        offload_activations(Stack(), tmp_path, inside_graphs=True, codec="int4")
