#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a small GPT on real text with its activations on the SSD. Sets up whatever is missing first.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
TRAINER="$ROOT/examples/pretrain_gpt.py"
CORPUS="$ROOT/data/stdlib"

usage() {
    cat <<'TEXT'
Usage: examples/pretrain_gpt.sh [FLAGS OF THE TRAINER]

Trains a GPT of 12 layers and hidden size 512 for 100 iterations; activations go to runs/offload.
Flags given here come after the defaults and win over them. Without --data-path (or --mock-data) the
text is the Python standard library's sources, prepared once in data/stdlib.

Environment:
  NPROC_PER_NODE   processes on this machine (default 1; more start torchrun)
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun
  PYTHON, MEGATRON_OFFLOAD_PYTHON               see tools/bootstrap.sh

Flags of the trainer:

TEXT
}

# has_flag NAME ARGS...: whether --name or --name=value is among the arguments.
has_flag() {
    local name="$1" arg
    shift
    for arg in "$@"; do
        [[ "$arg" == "$name" || "$arg" == "$name="* ]] && return 0
    done
    return 1
}

# flag_value NAME DEFAULT ARGS...: the value that wins, which is the last one.
flag_value() {
    local name="$1" value="$2"
    shift 2
    while (($#)); do
        if [[ "$1" == "$name" && $# -gt 1 ]]; then
            value="$2"
        elif [[ "$1" == "$name="* ]]; then
            value="${1#*=}"
        fi
        shift
    done
    printf '%s' "$value"
}

build_quickstart_corpus() {
    if [[ -r "$CORPUS/tokenizer.json" && -r "$CORPUS/corpus_text_document.bin" &&
        -r "$CORPUS/corpus_text_document.idx" ]]; then
        return
    fi
    echo "pretrain_gpt.sh: preparing the Python standard library's sources in $CORPUS" >&2
    "$PYTHON" "$ROOT/tools/preprocess_data.py" --stdlib --vocab-size 8192 --append-eod \
        --output-prefix "$CORPUS/corpus" >&2
}

# On a CPU, memory that offload frees leaves the process only with an allocator that returns it, and
# that has to be there before Python starts. What the caller has set stays as it is.
use_cpu_allocator() {
    local settings="$ROOT/megatron/offload/storage/allocator.py" line
    if [[ -e /dev/nvidiactl || "$(flag_value --activation-offload ssd "$@")" == off ]]; then
        return
    fi
    while IFS= read -r line; do
        [[ -v "${line%%=*}" ]] || export "${line?}"
    done < <("$PYTHON" -I "$settings")
}

# shellcheck source=tools/bootstrap.sh
source "$ROOT/tools/bootstrap.sh"
bootstrap

if has_flag --help "$@" || has_flag -h "$@"; then
    usage
    exec "$PYTHON" "$TRAINER" --help
fi

train_iters="$(flag_value --train-iters 100 "$@")"
flags=(
    --num-layers 12 --hidden-size 512 --num-attention-heads 8
    --seq-length 512 --micro-batch-size 4
    --attention-dropout 0 --hidden-dropout 0
    --train-iters 100 --lr 6e-4 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --log-interval 1 --eval-interval 50 --eval-iters 4
    --activation-offload ssd --activation-offload-dir "$ROOT/runs/offload"
)
# A fixed warm-up, so that a run may be prolonged; none where the run is no longer than it.
if [[ "$train_iters" =~ ^[0-9]+$ ]] && ((10#$train_iters > 5)); then
    flags+=(--lr-warmup-iters 5)
fi
if ! has_flag --data-path "$@" && ! has_flag --mock-data "$@"; then
    build_quickstart_corpus
    flags+=(--data-path "$CORPUS/corpus_text_document" --tokenizer-model "$CORPUS/tokenizer.json")
fi
if ! has_flag --metrics-file "$@" && ! has_flag --save "$@"; then
    flags+=(--metrics-file "$ROOT/runs/gpt-$(date +%Y%m%d-%H%M%S)/metrics.jsonl")
fi
mkdir -p "$ROOT/runs/offload"
use_cpu_allocator "$@"

processes="${NPROC_PER_NODE:-1}" nodes="${NNODES:-1}"
if ! [[ "$processes" =~ ^[1-9][0-9]*$ && "$nodes" =~ ^[1-9][0-9]*$ ]]; then
    echo "pretrain_gpt.sh: error: NPROC_PER_NODE and NNODES must be positive whole numbers," \
        "got $processes and $nodes" >&2
    exit 2
fi
if ((processes * nodes == 1)); then
    exec "$PYTHON" "$TRAINER" "${flags[@]}" "$@"
fi

# One process checks the flags first: its sentence and exit code 2 would drown in torchrun's report.
RANK=0 WORLD_SIZE=$((processes * nodes)) LOCAL_RANK=0 LOCAL_WORLD_SIZE="$processes" \
    "$PYTHON" "$TRAINER" "${flags[@]}" "$@" --validate-only
if has_flag --validate-only "$@"; then
    exit 0
fi
launch=(-m torch.distributed.run --nproc-per-node "$processes")
if ((nodes == 1)) && [[ -z "${MASTER_PORT:-}" ]]; then
    launch+=(--standalone) # picks a free port
else
    launch+=(--nnodes "$nodes" --node-rank "${NODE_RANK:-0}"
        --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
fi
exec "$PYTHON" "${launch[@]}" "$TRAINER" "${flags[@]}" "$@"
