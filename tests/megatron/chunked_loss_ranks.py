# SPDX-License-Identifier: Apache-2.0
"""The losses of small Megatron models, as they are, in chunks, and in fp64; test_chunked_loss.py
starts it on two ranks, which first have the whole vocabulary each, then share it.

Prints for each case how far the loss and each gradient are from fp64, both ways.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload.integration.megatron import cpu_runtime
from megatron.offload.integration.megatron.chunked_loss import ChunkedLoss
from tests.support.ranks import init_process_group

VOCAB, HIDDEN, LENGTH, BATCH = 2 * 509, 64, 48, 2
CHUNK = 20  # divides neither the tokens nor, on two ranks, those of one
MASKED = 5  # every fifth token


class Case:
    """A model without layers: embedding, output layer and loss, with hidden states put in between.

    Args:
        dtype: of the parameters.
        tied: whether the output layer's weight is the embedding's.
        sequence_parallel: whether hidden states are divided.
        biased: whether the output layer has a bias, as T5's.
    """

    def __init__(
        self, dtype: torch.dtype, *, tied: bool, sequence_parallel: bool, biased: bool = False
    ) -> None:
        self.dtype, self.tied, self.ranks = (
            dtype,
            tied,
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        self.rank = parallel_state.get_tensor_model_parallel_rank()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            use_cpu_initialization=True,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            tensor_model_parallel_size=self.ranks,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=False,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCAB,
            LENGTH,
            share_embeddings_and_output_weights=tied,
        ).to(dtype)
        self.layer = self.model.output_layer
        weight = self.model.shared_embedding_or_output_weight() if tied else self.layer.weight
        draw = torch.Generator().manual_seed(3)
        whole = torch.randn(VOCAB, HIDDEN, generator=draw) / HIDDEN**0.5
        weight.data.copy_(self.own(whole))
        if biased:
            bias = torch.randn(VOCAB, generator=draw)
            self.layer.bias = torch.nn.Parameter(self.own(bias).to(dtype))
        self.weight = weight
        self.labels = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
        self.tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
        self.mask = torch.ones(BATCH, LENGTH)
        self.mask.view(-1)[::MASKED] = 0.0
        self.hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=draw).to(dtype)
        self.is_divided = sequence_parallel and self.ranks > 1

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary."""
        return whole.chunk(self.ranks)[self.rank].clone()

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts, one after the other."""
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    def run(self) -> dict[str, torch.Tensor]:
        """The loss of each token and the gradients, of all ranks together."""
        model, hidden = self.model, self.hidden
        if self.is_divided:
            hidden = hidden.chunk(self.ranks)[self.rank]
        hidden = hidden.clone().requires_grad_()
        model.zero_grad()
        model.decoder.forward = lambda hidden_states, **_: hidden + hidden_states
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        losses = model(self.tokens, positions, None, labels=self.labels)
        ((losses * self.mask).sum() / self.mask.sum()).backward()
        found = {"loss": losses.detach(), "hidden": hidden.grad, "weight": self.weight.grad}
        if self.is_divided:
            found["hidden"] = self.gathered(hidden.grad)
        found["weight"] = self.gathered(self.weight.grad)
        if self.layer.bias is not None:
            found["bias"] = self.gathered(self.layer.bias.grad)
        return found

    def exact(self) -> dict[str, torch.Tensor]:
        """The same in fp64, of what the model was given."""
        embedding = self.model.embedding
        table = embedding.word_embeddings.weight.detach()
        positions = embedding.position_embeddings.weight.detach().double()
        weight = self.gathered(self.weight.detach()).double().requires_grad_()
        table = weight if self.tied else self.gathered(table).double()
        hidden = self.hidden.double().requires_grad_()
        # What comes out of the embedding, rounded as the model rounds it.
        embedded = table[self.tokens] + positions[:LENGTH]
        inputs = hidden + embedded.transpose(0, 1)
        inputs = inputs + (self.rounded(hidden, table, positions) - inputs).detach()
        logits = inputs @ weight.t()
        bias = None
        if self.layer.bias is not None:
            bias = self.gathered(self.layer.bias.detach()).double().requires_grad_()
            logits = logits + bias
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(0, 1).reshape(-1, VOCAB), self.labels.view(-1), reduction="none"
        ).view(BATCH, LENGTH)
        ((losses * self.mask).sum() / self.mask.sum()).backward()
        found = {"loss": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}
        if bias is not None:
            found["bias"] = bias.grad
        return found

    def rounded(
        self, hidden: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The output layer's input as the model computes it."""
        embedded = table[self.tokens].to(self.dtype) + positions[:LENGTH].to(self.dtype)
        return (hidden.to(self.dtype) + embedded.transpose(0, 1)).double().detach()

    def errors(self) -> dict[str, Any]:
        """Relative distances to fp64: as it is, and in chunks."""
        self.model.embedding.embedding_dropout.p = 0.0
        exact, usual = self.exact(), self.run()
        loss = ChunkedLoss([self.model], CHUNK)
        loss.connect()
        chunked = self.run()
        loss.close()
        again = self.run()
        return {
            "usual": {name: distance(usual[name], exact[name]) for name in exact},
            "chunked": {name: distance(chunked[name], exact[name]) for name in exact},
            "differs": any(not torch.equal(usual[name], chunked[name]) for name in exact),
            "restored": all(torch.equal(usual[name], again[name]) for name in exact),
        }


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def cases(size: int) -> Iterator[tuple[str, Case]]:
    """All of them for so many ranks that share the vocabulary."""
    for dtype in (torch.float32, torch.bfloat16):
        for tied in (True, False):
            for divided in (False, True) if size > 1 else (False,):
                name = f"TP{size} {dtype} tied={tied} SP={divided}"
                yield name, Case(dtype, tied=tied, sequence_parallel=divided)
        biased = Case(dtype, tied=False, sequence_parallel=False, biased=True)
        yield f"TP{size} {dtype} biased", biased


def main() -> None:
    init_process_group()
    cpu_runtime.activate()
    results = {}
    for size in (1, 2):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        model_parallel_cuda_manual_seed(5)
        for name, case in cases(size):
            results[name] = case.errors()
        parallel_state.destroy_model_parallel()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
