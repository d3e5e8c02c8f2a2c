#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a small GPT on real text with its activations on the SSD. Sets up whatever is missing first.
set -euo pipefail

# shellcheck source=examples/trainer/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer/launch.sh"

usage() {
    cat <<'TEXT'
Usage: examples/pretrain_gpt.sh [FLAGS OF THE TRAINER]

Trains a GPT of 12 layers and hidden size 512 for 100 iterations; activations go to runs/offload.
Flags given here come after the defaults and win over them. Without --data-path (or --mock-data) the
text is the Python standard library's sources, prepared once in data/stdlib.
TEXT
}

# shellcheck disable=SC2034  # launch.sh reads them
{
    MODEL=gpt
    CORPUS="$ROOT/data/stdlib"
    LEVEL=document
    CORPUS_IS="the Python standard library's sources"
    CORPUS_FLAGS=(--vocab-size 8192 --append-eod)
    MODEL_FLAGS=(
        --num-layers 12 --hidden-size 512 --num-attention-heads 8
        --seq-length 512 --micro-batch-size 4
        --lr 6e-4 --weight-decay 0.1 --adam-beta2 0.95
    )
}
launch "$@"
