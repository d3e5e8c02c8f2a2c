#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a small T5 on real text with its activations on the SSD. Sets up whatever is missing first.
set -euo pipefail

# shellcheck source=examples/trainer/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer/launch.sh"

usage() {
    cat <<'TEXT'
Usage: examples/pretrain_t5.sh [FLAGS OF THE TRAINER]

Trains a T5 of 6 + 6 layers and hidden size 512 for 100 iterations; activations go to runs/offload.
Flags given here come after the defaults and win over them. Without --data-path the text is the prose
in the Python standard library's docstrings, prepared once in data/stdlib-t5.
TEXT
}

# shellcheck disable=SC2034  # launch.sh reads them
{
    MODEL=t5
    CORPUS="$ROOT/data/stdlib-t5"
    LEVEL=sentence
    CORPUS_IS="the prose of the Python standard library"
    CORPUS_FLAGS=(--split-sentences --vocab-size 8192 --vocab-extra-ids 100)
    MODEL_FLAGS=(
        --encoder-num-layers 6 --decoder-num-layers 6
        --hidden-size 512 --num-attention-heads 8
        --seq-length 256 --decoder-seq-length 96 --micro-batch-size 8
        --lr 6e-4 --weight-decay 0.01
    )
}
launch "$@"
