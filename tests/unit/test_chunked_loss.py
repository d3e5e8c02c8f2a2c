# SPDX-License-Identifier: Apache-2.0
"""Output projection and cross entropy over chunks: as close to fp64 as in one piece, and as small.

Chunks change the order of a sum, so nothing is compared bit for bit with the loss in one piece.
Both are compared with fp64 instead: the chunked error may be 1.5 times the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.offload.ops import chunked_gradients
from megatron.offload.ops.chunked_logits import LossSettings, chunk_tokens_for
from megatron.offload.ops.chunked_loss import ExpectedGradient, chunked_cross_entropy
from megatron.offload.ops.chunked_mean import chunked_mean_loss

MOST = 1.5  # times the error of the loss in one piece
IGNORED = -100
Loss = Callable[..., torch.Tensor]


class Case:
    """Inputs of a loss, the gradient that comes back for each token, and what fp64 says.

    Args:
        dtype: of hidden states, weight and bias.
        tokens, vocab, hidden: their sizes.
        scale: of the logits.
        has_bias: whether there is one.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        tokens: int = 96,
        vocab: int = 509,
        hidden: int = 64,
        scale: float = 2.0,
        has_bias: bool = False,
        **options: Any,
    ) -> None:
        draw = torch.Generator().manual_seed(tokens + vocab)
        self.inputs = {
            "hidden": torch.randn(tokens, hidden, generator=draw),
            "weight": torch.randn(vocab, hidden, generator=draw) * scale / hidden**0.5,
        }
        if has_bias:
            self.inputs["bias"] = torch.randn(vocab, generator=draw)
        self.inputs = {name: value.to(dtype) for name, value in self.inputs.items()}
        self.labels = torch.randint(vocab, (tokens,), generator=draw)
        if "ignore_index" in options:
            self.labels[::3] = IGNORED
        self.gradient = torch.rand(tokens, generator=draw) / tokens
        self.options = options
        self.exact = self.run(in_one_piece, torch.float64)

    def run(self, loss: Loss, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The loss of each token and all gradients, computed in a dtype."""
        inputs = {
            name: value.to(dtype or value.dtype, copy=True).requires_grad_()
            for name, value in self.inputs.items()
        }
        losses = loss(**inputs, labels=self.labels, **self.options)
        losses.backward(self.gradient.to(losses.dtype))
        return {"loss": losses.detach(), **{name: one.grad for name, one in inputs.items()}}

    def errors(self, loss: Loss) -> dict[str, float]:
        """Relative distance to fp64, in the 2-norm, of the loss and each gradient."""
        found = self.run(loss)
        return {
            name: float((found[name].double() - exact).norm() / exact.norm())
            for name, exact in self.exact.items()
        }


def in_one_piece(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """As frameworks compute it: logits in the model's dtype, the loss in fp32."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    wide = logits.float() if logits.dtype is not torch.float64 else logits
    return torch.nn.functional.cross_entropy(
        wide, labels, reduction="none", ignore_index=ignore_index
    )


def in_chunks(chunk_tokens: int | None = None, expected: ExpectedGradient | None = None) -> Loss:
    """Chunks of at most so many tokens."""

    def loss(hidden: Any, weight: Any, labels: Any, bias: Any = None, **options: Any) -> Any:
        settings = LossSettings(chunk_tokens, **options)
        return chunked_cross_entropy(
            hidden, weight, labels, bias=bias, settings=settings, expected=expected
        )

    return loss


def assert_as_exact(case: Case, chunk_tokens: int | None) -> None:
    """The error against fp64 is at most `MOST` times the loss in one piece's."""
    whole, chunked = case.errors(in_one_piece), case.errors(in_chunks(chunk_tokens))
    for name, error in chunked.items():
        # Below a unit of the last place of fp32 the difference is that of two lucky roundings.
        assert error <= MOST * max(whole[name], 2.0**-24), (name, error, whole[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "vocab", "chunk_tokens"),
    [
        (96, 509, 1),
        (96, 509, 32),
        (97, 1009, 32),  # chunks divide neither
        (96, 509, 1000),  # one chunk
        (300, 8191, None),
        (1, 509, None),
        (2, 2, 1),
    ],
)
def test_the_error_against_fp64_is_that_of_the_loss_in_one_piece(
    dtype: torch.dtype, tokens: int, vocab: int, chunk_tokens: int | None
) -> None:
    assert_as_exact(Case(dtype, tokens=tokens, vocab=vocab), chunk_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"has_bias": True},
        {"has_bias": True, "ignore_index": IGNORED},
        {"ignore_index": IGNORED},
        {"scale": 30.0},  # logits as large as their softmax is sharp
        {"scale": 1e-3},
        {"logit_scale": 0.0625},
        {"logit_scale": 3.0, "has_bias": True},
        {"soft_cap": 30.0},
        {"soft_cap": 5.0, "scale": 30.0},  # nearly all logits are at the cap
        {"soft_cap": 50.0, "scale": 200.0, "ignore_index": IGNORED},  # exponentials that vanish
        {"soft_cap": 7.0, "logit_scale": -1.7, "ignore_index": IGNORED},
        {},
    ],
    ids=str,
)
def test_every_option_keeps_to_the_error_in_one_piece(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert_as_exact(Case(dtype, tokens=70, **options), 16)


def test_a_weight_gradient_in_bf16_does_not_drift_with_the_number_of_chunks() -> None:
    """A sum of 512 parts in bf16 would have lost most of them."""
    case = Case(torch.bfloat16, tokens=512, vocab=64)
    case.gradient.fill_(1.0)
    case.labels.zero_()  # all parts have the same sign
    case.exact = case.run(in_one_piece, torch.float64)
    assert_as_exact(case, 1)


def test_no_tokens_have_no_loss_and_no_gradient() -> None:
    case = Case(tokens=0)
    found = case.run(in_chunks())
    assert found["loss"].shape == (0,) and found["hidden"].shape == (0, 64)
    assert torch.equal(found["weight"], torch.zeros(509, 64))


def test_tokens_that_a_mask_leaves_out_change_no_gradient() -> None:
    """Megatron's masks are zeros in the gradient that comes back, whatever the label."""
    case = Case(tokens=40)
    case.gradient[::2] = 0.0
    usual = case.run(in_chunks(7))
    case.labels[::2] = -1
    masked = case.run(in_chunks(7))
    for name in ("hidden", "weight"):
        assert torch.equal(masked[name], usual[name])
    assert torch.equal(masked["loss"][1::2], usual["loss"][1::2])
    assert torch.isfinite(masked["loss"]).all()
    assert not masked["hidden"][::2].any()


def test_ignored_tokens_have_loss_zero() -> None:
    case = Case(tokens=30, ignore_index=IGNORED)
    found = case.run(in_chunks(7))
    assert not found["loss"][::3].any() and found["loss"][1::3].all()
    assert not found["hidden"][::3].any()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_wants_no_gradient_gets_none_and_changes_no_other(frozen: str) -> None:
    case = Case(has_bias=True)
    usual = case.run(in_chunks(16))
    inputs = {name: value.clone() for name, value in case.inputs.items()}
    for name, value in inputs.items():
        value.requires_grad_(name != frozen)
    in_chunks(16)(**inputs, labels=case.labels).backward(case.gradient)
    for name, value in inputs.items():
        if name == frozen:
            assert value.grad is None
        else:
            assert torch.equal(value.grad, usual[name])


def test_without_gradients_the_loss_is_the_same_and_keeps_nothing() -> None:
    case = Case()
    with torch.no_grad():
        loss = in_chunks(16)(**case.inputs, labels=case.labels)
    assert loss.grad_fn is None
    assert torch.equal(loss, case.run(in_chunks(16))["loss"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_keeps_two_numbers_a_token(dtype: torch.dtype) -> None:
    case = Case(dtype, tokens=256)
    inputs = {name: value.requires_grad_() for name, value in case.inputs.items()}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = in_chunks(16)(**inputs, labels=case.labels)
    known = {one.untyped_storage().data_ptr() for one in (*inputs.values(), case.labels)}
    others = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in saved
        if one.untyped_storage().data_ptr() not in known
    }
    assert sum(others.values()) == 2 * 4 * 256
    loss.sum().backward()


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that operations give while it is on."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0}], ids=str)
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_a_gradient(options: dict[str, Any]) -> None:
    case = Case(tokens=1024, vocab=512, hidden=16, **options)
    with Allocations() as seen:
        case.run(in_chunks(64))
    assert seen.largest == 64 * 512
    with Allocations() as seen:
        case.run(in_one_piece)
    assert seen.largest == 1024 * 512


def test_a_product_for_the_weights_gradient_is_added_by_blocks_of_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU it is an fp32 matrix of its own: 2 GB of Llama 3's vocabulary, were it whole."""
    if "dtype" not in torch.ops.aten.mm.overloads():
        pytest.skip("this torch has no product of bf16 matrices in fp32")
    sizes: list[int] = []
    mm = torch.mm

    def counted(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        product = mm(left.to(out_dtype), right.to(out_dtype))
        sizes.append(product.nbytes)
        return product

    monkeypatch.setattr(torch, "mm", counted)  # a CPU has none with `out_dtype`
    monkeypatch.setattr(chunked_gradients, "_PRODUCT_BYTES", 4096)
    draw = torch.Generator().manual_seed(3)
    of_logits = torch.randn(24, 509, generator=draw).bfloat16()
    hidden = torch.randn(24, 64, generator=draw).bfloat16()
    total = torch.ones(509, 64)
    chunked_gradients._add_product(total, of_logits.t(), hidden)
    assert max(sizes) == 4096 and sum(sizes) == total.nbytes
    exact = of_logits.t().double() @ hidden.double()
    assert float(((total - 1.0) - exact).norm() / exact.norm()) < 1e-6


# ------------------------------------------------------------------ gradients made in forward


def mean_of(loss: Loss) -> Loss:
    """The mean over a number of tokens, as a tensor of one element."""

    def mean(hidden: Any, labels: Any, **more: Any) -> Any:
        return (loss(hidden=hidden, labels=labels, **more).sum() / DIVISOR).reshape(1)

    return mean


def mean_in_chunks(chunk_tokens: int | None) -> Loss:
    """The same, with gradients made in forward."""

    def mean(hidden: Any, weight: Any, labels: Any, bias: Any = None, **options: Any) -> Any:
        settings = LossSettings(chunk_tokens, **options)
        divisor = torch.tensor(DIVISOR)
        return chunked_mean_loss(
            hidden, weight, labels, divisor, bias=bias, settings=settings
        ).reshape(1)

    return mean


DIVISOR = 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.125, 0.3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_bias": True, "ignore_index": IGNORED},
        {"logit_scale": 0.3, "soft_cap": 4.0, "has_bias": True, "ignore_index": IGNORED},
    ],
    ids=str,
)
def test_gradients_made_in_forward_keep_to_the_error_in_one_piece(
    dtype: torch.dtype, factor: float, options: dict[str, Any]
) -> None:
    case = Case(dtype, tokens=90, **options)
    case.gradient = torch.tensor([factor])
    case.exact = case.run(mean_of(in_one_piece), torch.float64)
    whole, chunked = case.errors(mean_of(in_one_piece)), case.errors(mean_in_chunks(16))
    for name, error in chunked.items():
        assert error <= MOST * max(whole[name], 2.0**-24), (name, error, whole[name])


def test_gradients_made_in_forward_serve_one_backward_pass() -> None:
    case = Case()
    inputs = {name: value.requires_grad_() for name, value in case.inputs.items()}
    loss = mean_in_chunks(16)(**inputs, labels=case.labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="made in its forward pass and are used up"):
        loss.backward()


class Products:
    """Counts the matrix products of a chunk's logits and of gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        for name in ("mm", "addmm"):
            monkeypatch.setattr(torch, name, self._counted(getattr(torch, name)))

    def _counted(self, product: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return product(*args, **kwargs)

        return counted

    def of(self, case: Case, loss: Loss) -> tuple[int, dict[str, torch.Tensor]]:
        """How many a pass took, and what came of it."""
        before, found = self.number, case.run(loss)
        return self.number - before, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_bias": True, "ignore_index": IGNORED},
        {"logit_scale": 0.3, "soft_cap": 4.0},
    ],
    ids=str,
)
def test_a_gradient_that_was_expected_saves_a_product_and_changes_no_bit(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(dtype, tokens=90, **options)
    case.gradient.fill_(1 / 90)
    products, expected = Products(monkeypatch), ExpectedGradient()
    passes = [products.of(case, in_chunks(16, expected)) for _ in range(3)]
    assert [number for number, _ in passes] == [18, 12, 12]  # six chunks
    usual = case.run(in_chunks(16))
    for _, found in passes:
        assert all(torch.equal(found[name], usual[name]) for name in usual)


def test_a_gradient_that_was_not_expected_changes_no_bit_and_is_expected_then() -> None:
    case, expected = Case(), ExpectedGradient()
    for value in (0.25, 0.5):
        case.gradient.fill_(value)
        found = case.run(in_chunks(16, expected))
        assert all(torch.equal(found[k], one) for k, one in case.run(in_chunks(16)).items())
        assert expected.value == value


def test_where_a_mask_leaves_tokens_out_nothing_is_expected_any_more() -> None:
    case, expected = Case(), ExpectedGradient()
    case.gradient.fill_(0.25)
    case.run(in_chunks(16, expected))
    case.gradient[7] = 0.0
    found = case.run(in_chunks(16, expected))
    assert all(torch.equal(found[k], one) for k, one in case.run(in_chunks(16)).items())
    assert expected.value is None
    case.gradient.fill_(0.25)
    case.run(in_chunks(16, expected))
    assert expected.value is None


def test_expectations_that_are_wrong_more_often_than_right_end() -> None:
    case, expected = Case(), ExpectedGradient()
    values = [1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0, 5.0, 6.0]
    seen = []
    for value in values:
        case.gradient.fill_(value)
        case.run(in_chunks(16, expected))
        seen.append(expected.value)
    assert seen == [1.0, 1.0, 2.0, 3.0, 3.0, 4.0, None, None, None]


@pytest.mark.parametrize("how", ["float16", "main_grad"])
def test_where_gradients_are_better_made_in_backward_nothing_is_expected(how: str) -> None:
    case = Case(torch.float16 if how == "float16" else torch.float32)
    case.gradient.fill_(0.25)
    expected = ExpectedGradient()
    case.options["into_main_grad"] = how == "main_grad"
    case.run(in_chunks(16, expected))
    assert expected.value is None


def test_gradients_that_forward_has_made_need_nothing_brought_back() -> None:
    case, expected = Case(), ExpectedGradient()
    case.gradient.fill_(0.25)
    inputs = {name: value.requires_grad_() for name, value in case.inputs.items()}
    brought_back = [0, 0]
    for turn in range(2):

        def unpack(tensor: torch.Tensor, turn: int = turn) -> torch.Tensor:
            brought_back[turn] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            losses = in_chunks(16, expected)(**inputs, labels=case.labels)
        losses.backward(case.gradient)
    assert brought_back[0] > 0 and brought_back[1] == 0


def test_a_second_backward_pass_makes_the_gradients_anew() -> None:
    case, expected = Case(), ExpectedGradient()
    case.gradient.fill_(0.25)
    case.run(in_chunks(16, expected))
    inputs = {name: value.requires_grad_() for name, value in case.inputs.items()}
    losses = in_chunks(16, expected)(**inputs, labels=case.labels)
    first = torch.autograd.grad(losses, list(inputs.values()), case.gradient, retain_graph=True)
    again = torch.autograd.grad(losses, list(inputs.values()), case.gradient)
    assert all(map(torch.equal, first, again))


# ------------------------------------------------------------------ the gradient of Megatron's DDP


@pytest.fixture
def parameter() -> torch.nn.Parameter:
    """A weight as Megatron's data parallelism prepares it."""
    one = torch.nn.Parameter(Case(torch.bfloat16).inputs["weight"])
    one.grad_added_to_main_grad = False
    one.main_grad = torch.ones(one.shape)
    return one


def backward_into(parameter: torch.nn.Parameter) -> Case:
    case = Case(torch.bfloat16)
    settings = LossSettings(16, into_main_grad=True)
    loss = chunked_cross_entropy(case.inputs["hidden"], parameter, case.labels, settings=settings)
    loss.backward(case.gradient)
    return case


def test_the_weights_gradient_is_added_to_main_grad_in_fp32(
    parameter: torch.nn.Parameter,
) -> None:
    case = backward_into(parameter)
    added = (parameter.main_grad - 1.0).double()
    exact = case.exact["weight"]
    assert parameter.grad_added_to_main_grad
    assert float((added - exact).norm() / exact.norm()) < case.errors(in_one_piece)["weight"]
    assert parameter.grad.shape == parameter.shape  # so that hooks on it run


def test_a_tied_weight_gets_zeros_from_the_loss(parameter: torch.nn.Parameter) -> None:
    """Autograd adds them to the embedding's gradient, which Megatron then adds to `main_grad`."""
    parameter.zero_out_wgrad = True
    backward_into(parameter)
    assert not parameter.grad.any()


def test_main_grad_in_bf16_is_rounded_once(parameter: torch.nn.Parameter) -> None:
    parameter.main_grad = torch.zeros_like(parameter)
    case = backward_into(parameter)
    usual = case.run(in_chunks(16))["weight"]
    assert torch.equal(parameter.main_grad, usual)


def test_main_grad_is_found_where_saved_tensors_come_back_as_others(
    parameter: torch.nn.Parameter,
) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        backward_into(parameter)
    assert parameter.grad_added_to_main_grad
    assert bool((parameter.main_grad != 1.0).any())


# ------------------------------------------------------------------ the size of chunks


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "device", "chunk"),
    [
        (2048, 512, 8192, "cpu", 256),
        (2048, 512, 128000, "cpu", 256),  # enough rows for a product
        (8192, 4096, 32000, "cpu", 1048),  # as large as the hidden states
        (8192, 4096, 32000, "cuda", 2097),
        (8192, 4096, 128000, "cuda", 1024),
    ],
)
def test_chunks_are_as_large_as_hidden_states_but_not_too_small(
    tokens: int, hidden: int, vocab: int, device: str, chunk: int
) -> None:
    assert chunk_tokens_for(tokens, hidden, vocab, device) == chunk


def test_chunks_are_of_about_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """65 tokens in chunks of 64 are 33 and 32, not 64 and 1."""
    rows: list[int] = []
    mm = torch.mm

    def counted(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        rows.append(len(left))
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    case = Case(tokens=65)
    with torch.no_grad():
        in_chunks(64)(**case.inputs, labels=case.labels)
    assert rows == [33, 32]
