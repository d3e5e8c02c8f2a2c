# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_bert.py and pretrain_t5.py, with and without offload.

    MEGATRON_LM_PATH=/path/to/Megatron-LM pytest -s tests/megatron/test_unmodified_bert_and_t5.py

They have no mock data upstream: the corpus and the tokenizer are made here. The interpreter needs
transformers, and what is in `test_unmodified_megatron_lm.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from test_unmodified_megatron_lm import CHECKOUT, Run, offload, run_script
from test_unmodified_megatron_lm import pytestmark as needs_a_checkout
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

pytestmark = needs_a_checkout

SPECIAL_TOKENS = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
SIZES = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 8 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 4 --split 8,1,1 --num-workers 0
    --train-iters 4 --lr 1e-3 --min-lr 1e-4 --eval-interval 2 --eval-iters 1 --log-interval 1
    --ckpt-format torch --save-interval 2
"""
MODELS = {
    "bert": "--seq-length 128",
    "t5": "--encoder-seq-length 128 --decoder-seq-length 64 --vocab-extra-ids 30",
}
LAYOUTS = {
    "bert": (2, "--pipeline-model-parallel-size 2"),
    "t5": (2, "--tensor-model-parallel-size 2"),
}


def script_of(model: str) -> Path:
    """At the root of the checkout, or where later releases have it."""
    places = [CHECKOUT / f"pretrain_{model}.py", CHECKOUT / f"examples/{model}/pretrain_{model}.py"]
    return next(place for place in places if place.is_file())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a corpus of sentences and of its tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    special = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL_TOKENS}
    sentinels = [f"<extra_id_{number}>" for number in range(30)]
    words = [*special.values(), *sentinels, *(f"word{number}" for number in range(200))]
    vocabulary = {word: number for number, word in enumerate(words)}
    Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    settings["additional_special_tokens"] = sentinels
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.uint16)
    draw = random.Random(1)
    for _ in range(200):
        lengths = [draw.randrange(5, 30) for _ in range(draw.randrange(3, 9))]
        tokens = [draw.randrange(len(words) - 200, len(words)) for _ in range(sum(lengths))]
        builder.add_document(np.array(tokens), lengths)
    builder.finalize(f"{folder}/text.idx")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    return f"--data-path {folder}/text {tokenizer}".split()


def pretrain(model: str, mode: str, directory: Path, data: list[str]) -> Run:
    """A whole run, with its checkpoints in the directory."""
    num_ranks, layout = LAYOUTS[model]
    flags = [*SIZES.split(), *MODELS[model].split(), *layout.split(), *data]
    flags += ["--save", str(directory), "--data-cache-path", str(directory / "index")]
    return run_script(script_of(model), num_ranks, directory, *flags, *offload(mode, directory))


@pytest.mark.parametrize("model", MODELS)
def test_losses_weights_and_optimizer_are_bit_identical(
    model: str, data: list[str], tmp_path: Path
) -> None:
    runs = {}
    for mode in ("off", "ssd"):
        (tmp_path / mode).mkdir()
        runs[mode] = pretrain(model, mode, tmp_path / mode, data)
    off, ssd = runs["off"], runs["ssd"]
    assert len(off.losses()) == 8
    assert ssd.losses() == off.losses()
    expected = off.checkpoints()
    assert list(expected) == ["iter_0000002", "iter_0000004"]
    assert ssd.checkpoints() == expected
    assert off.offloaded() == []
    assert len(ssd.offloaded()) == 4 and "0 B" not in ssd.offloaded()
