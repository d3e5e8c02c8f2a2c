# SPDX-License-Identifier: Apache-2.0
"""`tiled_mlp` at the door, on models of transformers as they are, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations, offload_parameters
from tests.support.models import clone_of
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron.offload.integration import tiled_mlps  # noqa: E402
from megatron.offload.integration.huggingface import OffloadCallback  # noqa: E402
from megatron.offload.integration.torch.measured_run import MeasuredRun  # noqa: E402

SCRIPT = Path(__file__).parent / "tiled_ranks.py"
TILE = 11  # tokens: no part of any batch
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Mistral": {"num_key_value_heads": 2},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16},
    "Phi": {},
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "GPTNeoX": {},
    "Olmo2": {"num_key_value_heads": 2},
    "Starcoder2": {"num_key_value_heads": 2},
    "Granite": {"num_key_value_heads": 2},
}


def make(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(3)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def passes(model: Any, tiled_mlp: str | int, **settings: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step."""
    torch.manual_seed(4)
    tokens = torch.randint(0, 97, (2, 40))
    settings = {"mode": "off", **settings}
    with offload_activations(model, tiled_mlp=tiled_mlp, **settings):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_same_loss_and_gradients_within_rounding(family: str) -> None:
    model = make(family)
    own = [module.forward for module in model.modules()]
    alone = passes(model, "off")
    for settings in ({}, {"mode": "host", "host_budget": "64MiB", "min_bytes": 1024}):
        found = passes(model, TILE, **settings)
        assert found.keys() == alone.keys()
        for name, one in alone.items():
            torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(found[name], one) for name, one in alone.items()), "in tiles"
    assert [module.forward for module in model.modules()] == own
    again = passes(model, "auto")
    assert all(torch.equal(again[name], one) for name, one in alone.items()), "80 tokens: one tile"


def test_a_copy_of_attributes_computes_with_its_own_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A module that has a copy of the model's `__dict__` and weights of its own."""

    def run(**settings: Any) -> list[torch.Tensor]:
        model, tokens = make("Llama"), torch.randint(0, 97, (2, 40))
        with offload_activations(model, mode="off", **settings):
            clone = clone_of(model, {id(one): one * 0.5 for one in model.parameters()})
            loss = clone(input_ids=tokens, labels=tokens).loss
            loss.backward()
            with torch.no_grad():
                alone = clone.eval()(input_ids=tokens).logits
        return [loss.detach(), alone, *(p.grad for p in model.parameters() if p.grad is not None)]

    torch.manual_seed(4)
    expected = run()
    for settings in ({"tiled_mlp": TILE}, {"chunked_loss": 13}):
        torch.manual_seed(4)
        found = run(**settings)
        assert len(found) == len(expected) > 10
        assert all(map(torch.equal, found, expected)), settings
    assert "chunked_loss does nothing" not in caplog.text


def counted(module: Any) -> list[int]:
    """Tokens of each call of a module, as wide as those of the model, from now on."""
    seen: list[int] = []
    own = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.numel() // SIZES["hidden_size"])
        return own(x)  # type: ignore[no-any-return]

    module.forward = forward
    return seen


def test_an_mlp_runs_in_tiles_forward_and_again_in_backward() -> None:
    model = make("Llama")
    seen = counted(model.model.layers[0].mlp.gate_proj)
    passes(model, 20)
    assert seen[2:] == [20] * 8, "behind the two calls that try it"
    seen.clear()
    model.eval()
    with torch.no_grad(), offload_activations(model, mode="off", tiled_mlp=20):
        model(input_ids=torch.zeros(2, 40, dtype=torch.long))
    assert seen == [80], "passes that do not train are left alone"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_runs_the_same_tiles_twice(use_reentrant: bool) -> None:
    """The first time without gradients, where it is reentrant."""
    model = make("Llama")
    if transformers.__version__.startswith("4."):
        model.config.use_cache = False  # as checkpoints have it: it makes a mask then
    alone = passes(model, 20)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    seen = counted(model.model.layers[0].mlp.gate_proj)
    found = passes(model, 20)
    assert seen[2:] == [20] * 12, "forward, again, and once more for backward"
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], one) for name, one in alone.items())


def test_a_copy_of_the_model_has_its_own_mlps() -> None:
    model = make("Llama")
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        copied, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
    for one in (copied, torch.load(io.BytesIO(file.getvalue()), weights_only=False)):
        assert one.model.layers[0].mlp.forward.__self__ is one.model.layers[0].mlp


def test_activations_are_few_then() -> None:
    model = make("Llama")

    def saved(tiled_mlp: str | int) -> int:
        tokens = torch.zeros(2, 40, dtype=torch.long)
        with offload_activations(
            model, mode="host", host_budget="64MiB", min_bytes=1, replay="off", tiled_mlp=tiled_mlp
        ) as offload:
            model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        return int(offload.statistics["offloaded_bytes"])

    wide = 4 * 80 * SIZES["intermediate_size"]
    more = 4 * wide  # in each layer: gate, its function, up and their product
    of_norms = 5 * 4 * 80 * (SIZES["hidden_size"] + 1)  # what they divide, and by what
    assert saved("off") - saved(TILE) == SIZES["num_hidden_layers"] * more + of_norms


def test_a_norm_runs_in_tiles_forward_and_again_in_backward() -> None:
    model = make("Llama")
    seen = counted(model.model.norm)
    passes(model, 20)
    assert seen[2:] == [20] * 8, "behind the two calls that try it"
    seen.clear()
    handle = model.model.norm.weight.register_hook(lambda grad: grad)  # would see each tile's
    passes(model, 20)
    assert seen == [80], "in one piece"
    handle.remove()


def test_a_first_batch_of_few_tokens_is_tried_out_too() -> None:
    model = make("Llama")
    wide, normed = counted(model.model.layers[0].mlp.gate_proj), counted(model.model.norm)
    tokens = torch.zeros(1, 10, dtype=torch.long)
    with offload_activations(model, mode="off", tiled_mlp=5):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert wide[2:] == [5] * 4 and normed[2:] == [5] * 4


class ChannelsNorm(torch.nn.Module):
    """Over the first dimension behind the batch, as images have it; the last is as wide here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, channels, _, _ = x.shape
        length = x.pow(2).mean(1, keepdim=True).rsqrt()
        return self.weight.view(1, channels, 1, 1) * (x * length)


def test_a_norm_over_another_dimension_is_left_alone() -> None:
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.GELU(), torch.nn.Linear(80, 40))
    model = torch.nn.ModuleDict({"norm": ChannelsNorm(), "mlp": mlp})
    x = torch.randn(2, 40, 40, 40, requires_grad=True)

    def gradient() -> torch.Tensor:
        model["mlp"](model["norm"](x)).sum().backward()
        assert x.grad is not None
        found, x.grad = x.grad, None
        return found

    alone = gradient()
    with offload_activations(model, mode="off", tiled_mlp=64, layers=[torch.nn.Linear]):
        found = gradient()
    torch.testing.assert_close(found, alone)


class RunningNorm(torch.nn.Module):
    """A batch norm over all tokens, with statistics of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden))
        self.register_buffer("mean", torch.zeros(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.flatten(0, -2).mean(0) if self.training else self.mean
        if self.training:
            self.mean.lerp_(mean.detach(), 0.1)
        return self.weight * (x - mean)


def test_a_norm_with_running_statistics_is_left_alone() -> None:
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    model = torch.nn.ModuleDict({"norm": RunningNorm(16), "mlp": mlp})
    x = torch.randn(2, 40, 16) * torch.linspace(0.1, 3.0, 40)[:, None]
    alone = RunningNorm(16)
    expected = alone(x)
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        found = model["norm"](x)
    assert torch.equal(found, expected) and torch.equal(model["norm"].mean, alone.mean)


def test_modules_that_are_called_by_keywords_run_in_one_piece() -> None:
    """Of one of several arguments it is not known which are tokens."""
    model = make("Llama")
    layer = model.model.layers[0]
    x = torch.randn(2, 40, SIZES["hidden_size"])
    alone = layer.mlp(x), layer.input_layernorm(x)
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        found = layer.mlp(x=x), layer.input_layernorm(hidden_states=x)
    assert all(map(torch.equal, found, alone))


def test_norms_of_heads_have_tiles_of_as_many_values() -> None:
    model = make("Qwen3")
    seen = counted(model.model.layers[0].self_attn.q_norm)
    passes(model, 20)
    assert seen[2:] == [20] * 8


def test_results_of_norms_in_tiles_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> int:
        model = make("Llama")
        tokens = torch.zeros(2, 40, dtype=torch.long)
        settings: dict[str, Any] = {"host_budget": "64MiB", "min_bytes": 1024, "tiled_mlp": TILE}
        with offload_activations(model, mode="host", **settings) as offload:
            for _ in range(3):  # the first ones compare
                model(input_ids=tokens, labels=tokens).loss.backward()
        return int(offload.statistics["offloaded_bytes"])

    with_tiles = moved()
    monkeypatch.setattr(tiled_mlps, "_norms", lambda model: iter(()))
    assert with_tiles == moved()


def test_a_norm_that_runs_again_has_the_weights_of_forward() -> None:
    model = make("Llama")
    with offload_activations(
        model, mode="keep", min_bytes=1024, tiled_mlp=TILE, host_budget="64MiB"
    ):
        tokens = torch.randint(0, 97, (2, 40))
        alone = model(input_ids=tokens, labels=tokens).loss
        alone.backward()
        wanted = model.model.layers[1].self_attn.q_proj.weight.grad.clone()
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        weight = model.model.layers[1].input_layernorm.weight
        kept = weight.detach().clone()
        weight.data.mul_(3.0)  # not counted by torch, as an optimizer on another tier does it
        try:
            loss.backward()
        finally:
            weight.data.copy_(kept)
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight.grad, wanted)


def trained(params: bool = False, mode: str = "off", **settings: Any) -> torch.Tensor:
    """The weights after four steps with tiles.

    Args:
        params: they are on the host, but for those of two layers or what is outside of them.
        mode: of activations.
        settings: of the door.
    """
    model = make("Llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(4)
    tokens = torch.randint(0, 97, (2, 40))
    if mode != "off":
        settings |= {"host_budget": "64MiB", "min_bytes": 1024}
    with contextlib.ExitStack() as stack:
        stack.enter_context(offload_activations(model, mode=mode, tiled_mlp=TILE, **settings))
        if params:
            stack.enter_context(
                offload_parameters(model, mode="host", host_budget="64MiB", live_units=2)
            )
        for _ in range(4):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def test_tiles_have_the_same_bits_whatever_moves() -> None:
    alone = trained()
    assert torch.equal(trained(mode="host"), alone)
    assert torch.equal(trained(params=True, mode="host"), alone)
    again = {"recompute_layers": "all", "recompute_input": "host"}
    assert torch.equal(trained(mode="host", **again), alone)


def test_lora_trains_its_adapters_alone() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("Llama"), config)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.02)
    alone, found = passes(model, "off"), passes(model, TILE)
    assert found.keys() == alone.keys() and len(alone) == 1 + 2 * 2 * 2
    for name, one in alone.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)


def test_dropout_as_models_have_it() -> None:
    """GPT-2's drops a tenth behind its MLP; what is drawn differs, what is learned does not."""
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).train()
    assert model.transformer.h[0].mlp.dropout.p == 0.1

    def mean(tiled_mlp: str | int) -> torch.Tensor:
        found = []
        for seed in range(24):
            torch.manual_seed(seed)
            tokens = torch.arange(80).view(2, 40)
            with offload_activations(model, mode="off", tiled_mlp=tiled_mlp):
                model(input_ids=tokens, labels=tokens).loss.backward()
            found.append(model.transformer.h[0].mlp.c_fc.weight.grad.clone())
            model.zero_grad()
        return torch.stack(found).mean(0)

    alone, other = mean("off"), mean(TILE)
    assert float(torch.cosine_similarity(alone.flatten(), other.flatten(), 0)) > 0.95


def test_dropout_draws_the_same_in_backward() -> None:
    model = make("Llama")
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.Dropout(0.5)
    x = torch.randn(1, 40, 64, requires_grad=True)
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        torch.manual_seed(1)
        y = mlp(x)
        torch.rand(5)
        (given,) = torch.autograd.grad(y.sum(), mlp.down_proj.weight)
    # Each row has the sum of what was multiplied with the weight, which gives the results again.
    torch.testing.assert_close(y.sum((0, 1)), mlp.down_proj.weight @ given[0])


def test_dropout_that_begins_after_the_first_pass_draws_the_same_in_backward() -> None:
    """As with a rate that a schedule raises."""
    model = make("Llama")
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.Dropout(0.0)
    x = torch.randn(1, 40, 64, requires_grad=True)
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        mlp(x)
        mlp.act_fn.p = 0.5
        y = mlp(x)
        (given,) = torch.autograd.grad(y.sum(), mlp.down_proj.weight)
    torch.testing.assert_close(y.sum((0, 1)), mlp.down_proj.weight @ given[0])


def test_adapters_that_come_after_the_first_pass_have_gradients() -> None:
    class Adapted(torch.nn.Linear):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__(base.in_features, base.out_features, bias=False)
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + super().forward(x)

    def train(tiled_mlp: str | int) -> list[torch.Tensor]:
        model = make("Llama")
        mlp = model.model.layers[0].mlp
        x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
        with offload_activations(model, mode="off", tiled_mlp=tiled_mlp):
            mlp(x).sum().backward()
            torch.manual_seed(2)
            mlp.up_proj = Adapted(mlp.up_proj)
            mlp(x).square().sum().backward()
        return [one.grad for one in mlp.parameters()]

    for one, other in zip(train("off"), train(TILE), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["bf16", "gradient_checkpointing"])
def test_the_trainer_trains_the_same_within_rounding(more: str, tmp_path: Path) -> None:
    rows = torch.randint(0, 97, (8, 40), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": one, "labels": one} for one in rows]

    def train(*callbacks: Any) -> tuple[list[float], torch.Tensor]:
        model = make("Llama")
        settings: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, more: True}
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, **settings,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, callbacks=list(callbacks)
        )
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        return losses, torch.cat([one.detach().flatten() for one in model.parameters()])

    losses, weights = train()
    of_tiles, with_tiles = train(OffloadCallback(tmp_path, min_bytes=1024, tiled_mlp=TILE))
    assert of_tiles == pytest.approx(losses, rel=1e-3) and len(losses) == 4
    assert 0 < float((weights - with_tiles).abs().max()) < 1e-3


# -- Refused --------------------------------------------------------------------------------------


def refused(model: Any, tiled_mlp: str | int = TILE) -> str:
    with pytest.raises(ConfigurationError) as caught:
        passes(model, tiled_mlp)
    return str(caught.value)


def test_what_would_be_wrong_is_refused() -> None:
    model = make("Llama")
    mlp = model.model.layers[0].mlp

    class Mixes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(1, keepdim=True)

    mlp.act_fn = Mixes()
    assert (
        "model.layers.0.mlp (LlamaMLP) gives a token another result where others are beside it"
        in refused(model)
    )

    class Shifts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.pad(x, (0, 0, 1, -1))  # the token before it

    mlp.act_fn = Shifts()
    assert "gives a token another result where others are beside it" in refused(model)

    class Places(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.arange(x.shape[1])[:, None]

    mlp.act_fn = Places()
    assert "gives a token another result where others are beside it" in refused(model)
    mlp.act_fn = torch.nn.SiLU()

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    model.model.layers[0].mlp = Pair()
    assert "model.layers.0.mlp (Pair) returns a tuple, not a tensor" in refused(model)
    model.model.layers[0].mlp = mlp
    for hook in (
        mlp.up_proj.register_forward_hook,
        mlp.up_proj.register_forward_pre_hook,
        mlp.up_proj.register_full_backward_hook,
        mlp.up_proj.register_full_backward_pre_hook,
    ):
        handle = hook(lambda *_: None)
        assert "has hooks on model.layers.0.mlp.up_proj, which would be called" in refused(model)
        handle.remove()
    handle = mlp.up_proj.weight.register_hook(lambda grad: grad * 2)
    assert "a hook on the gradient of up_proj.weight" in refused(model)
    handle.remove()
    scale = torch.nn.Parameter(torch.ones(()))
    mlp.act_fn = type("Scaled", (torch.nn.Module,), {"forward": lambda _, x: x * scale})()
    assert "uses parameters that are not its own, whose gradients would be lost" in refused(model)


def test_what_changes_its_input_or_its_buffers_is_refused() -> None:
    """Tiles of an input that wants no gradient would have been dropped twice."""
    model = make("Llama")
    model.model.embed_tokens.requires_grad_(False)
    mlp = model.model.layers[0].mlp
    for first in (torch.nn.Dropout(0.5, inplace=True), torch.nn.ReLU(inplace=True)):
        model.model.layers[0].mlp = torch.nn.Sequential(first, mlp.gate_proj, mlp.down_proj)
        assert "(Sequential) changes its input in place" in refused(model)
    mlp.act_fn = RunningNorm(SIZES["intermediate_size"])
    model.model.layers[0].mlp = mlp
    before = torch.get_rng_state()
    assert "changes act_fn.mean in each pass, and would for each tile" in refused(model)
    assert not mlp.act_fn.mean.any() and torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_an_mlp_keeps_for_the_model_is_refused() -> None:
    """As those of mixtures of experts that balance what their gates choose."""
    model = make("Llama")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.first = torch.nn.Linear(64, 2), torch.nn.Linear(64, 64)
            self.losses: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.gate(x).softmax(-1)
            self.losses.append(chosen.mean((0, 1)).square().sum())
            return self.first(x) * chosen[..., :1]

    model.model.layers[0].mlp = experts = Experts()
    assert "(Experts) keeps losses, a result, and would keep the last tile's" in refused(model)
    assert not experts.losses


def test_what_a_module_is_given_after_the_trial_is_not_lost() -> None:
    """As guidance without a classifier does it, which leaves the condition out at times."""
    model = make("Llama")
    mlp = model.model.layers[0].mlp
    condition = torch.nn.Parameter(torch.ones(()))

    class Conditioned(torch.nn.SiLU):
        scale: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.scale is None else x * self.scale

    mlp.act_fn = Conditioned()
    x = torch.randn(1, 2 * TILE, SIZES["hidden_size"])
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        mlp(x).sum().backward()
        mlp.act_fn.scale = condition.exp()
        with pytest.raises(ConfigurationError, match="whose gradients would be lost"):
            mlp(x).sum().backward()


def test_what_overflows_is_no_reason_to_refuse() -> None:
    """A training in fp16 goes on behind a step whose values are infinite."""
    model = make("Llama")
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.Softmax(1)  # over tokens
    x = torch.randn(1, 2 * TILE, SIZES["hidden_size"])
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        assert not mlp(x * 1e39).isfinite().any()
        with pytest.raises(ConfigurationError, match="where others are beside it"):
            mlp(x)


def test_a_trial_is_no_call_that_a_module_counts() -> None:
    model = make("Llama")
    mlp = model.model.layers[0].mlp

    class Counts(torch.nn.SiLU):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    mlp.act_fn = Counts()
    x = torch.randn(1, 2 * TILE, SIZES["hidden_size"])
    with offload_activations(model, mode="off", tiled_mlp=TILE):
        mlp(x)
    assert mlp.act_fn.calls == 2  # tiles


def test_a_model_without_mlps_and_another_word_are_refused() -> None:
    assert "Linear has none that can be told" in refused(torch.nn.Linear(4, 4))
    message = "tiled_mlp: 'many' is neither off, auto nor a number of tokens"
    assert message in refused(make("Llama"), "many")


# -- Several ranks --------------------------------------------------------------------------------

WRAPPERS = ["ddp", "fsdp2", "fsdp1", "fsdp1, flat parameters"]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiled")
    found: list[dict[str, Any]] = run_ranks(SCRIPT, folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_ranks_have_the_same_weights_within_rounding(
    wrapper: str, of_ranks: list[dict[str, Any]]
) -> None:
    for rank in of_ranks:
        assert rank[wrapper]["is_tiled"]
        assert 0 < rank[wrapper]["off"] <= 1e-5


@pytest.mark.slow
def test_ddp_hears_of_each_gradient_once(of_ranks: list[dict[str, Any]]) -> None:
    for rank in of_ranks:
        assert rank["ddp"]["heard"] == [1]


def test_a_measured_run_may_tile_otherwise_than_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("Llama")
    off = passes(model, "off")
    off_then = ("--activation-offload", "off")
    tiles = (*off_then, "--activation-tiled-mlp", str(TILE))
    for of_run, of_script in ((off_then, TILE), (tiles, "off"), (None, TILE)):
        run = MeasuredRun(of_run, metrics_file=str(tmp_path / "metrics.jsonl"))
        monkeypatch.setenv(*next(iter(run.environment().items())))
        found = passes(model, of_script)
        is_tiled = not all(torch.equal(found[name], one) for name, one in off.items())
        assert is_tiled == (of_run != off_then)
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
        step = json.loads(line)
        assert step["peak_device_bytes"] >= step["peak_activation_bytes"] + (64 << 20)  # torch
