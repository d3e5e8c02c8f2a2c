#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a small BERT on real text with its activations on the SSD. Sets up whatever is missing
# first.
set -euo pipefail

# shellcheck source=examples/trainer/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer/launch.sh"

usage() {
    cat <<'TEXT'
Usage: examples/pretrain_bert.sh [FLAGS OF THE TRAINER]

Trains a BERT of 12 layers and hidden size 512 for 100 iterations; activations go to runs/offload.
Flags given here come after the defaults and win over them. Without --data-path the text is the prose
in the Python standard library's docstrings, prepared once in data/stdlib-bert.
TEXT
}

# shellcheck disable=SC2034  # launch.sh reads them
{
    MODEL=bert
    CORPUS="$ROOT/data/stdlib-bert"
    LEVEL=sentence
    CORPUS_IS="the prose of the Python standard library"
    CORPUS_FLAGS=(
        --split-sentences --tokenizer-type BertWordPieceLowerCase --vocab-size 8192
    )
    MODEL_FLAGS=(
        --num-layers 12 --hidden-size 512 --num-attention-heads 8
        --seq-length 256 --micro-batch-size 8
        --lr 3e-4 --weight-decay 0.01
    )
}
launch "$@"
