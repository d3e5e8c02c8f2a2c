# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_bert.py and pretrain_t5.py, with and without offload.

    MEGATRON_LM_PATH=/path/to/Megatron-LM pytest -s tests/megatron/test_unmodified_bert_and_t5.py

They have no mock data upstream: the corpus and the tokenizer are made here. What the interpreter
needs is in `test_unmodified_megatron_lm.py`; from release 0.19 on transformers as well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.support.megatron_lm_checkout import CHECKOUT, Run, needs_a_checkout, offload, run_script

pytestmark = needs_a_checkout

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]")
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(30))
SIZES = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 8 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 4 --split 8,1,1 --num-workers 0
    --train-iters 4 --lr 1e-3 --min-lr 1e-4 --eval-interval 2 --eval-iters 1 --log-interval 1
    --ckpt-format torch --save-interval 2
"""
MODELS = {
    "bert": "--seq-length 128",
    "t5": "--encoder-seq-length 128 --decoder-seq-length 64",
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
    words = [*SPECIAL_TOKENS, *SENTINELS, *(f"word{number}" for number in range(200))]
    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.uint16)
    draw = random.Random(1)
    for _ in range(200):
        lengths = [draw.randrange(5, 30) for _ in range(draw.randrange(3, 9))]
        tokens = [draw.randrange(len(words) - 200, len(words)) for _ in range(sum(lengths))]
        builder.add_document(np.array(tokens), lengths)
    builder.finalize(f"{folder}/text.idx")
    return f"--data-path {folder}/text {tokenizer_flags(folder, words)}".split()


def tokenizer_flags(folder: Path, words: Sequence[str]) -> str:
    """Makes it, too: WordPiece of Megatron-LM's own, or of later releases one of Hugging Face's."""
    if "--legacy-tokenizer" in (CHECKOUT / "megatron/training/arguments.py").read_text():
        (folder / "vocab.txt").write_text("\n".join(words) + "\n")
        kind = "--legacy-tokenizer --tokenizer-type BertWordPieceLowerCase"
        return f"{kind} --vocab-file {folder}/vocab.txt --vocab-extra-ids {len(SENTINELS)}"
    vocabulary = {word: number for number, word in enumerate(words)}
    Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    special = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    kind = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    return f"{kind} --tokenizer-special-tokens {' '.join(SENTINELS)}"


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
