# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What pretrain_gpt.sh, pretrain_bert.sh and pretrain_t5.sh share: setting up what is missing and
# starting the trainer. A script sources this file and sets
#   MODEL          name of examples/pretrain_MODEL.py
#   CORPUS         folder of the quickstart's corpus
#   LEVEL          document or sentence: what its files are called after
#   CORPUS_IS      what a person is told that it holds
#   CORPUS_FLAGS   for tools/preprocess_data.py
#   MODEL_FLAGS    for the trainer: size, lengths, learning rate
# and defines `usage`. Then it calls `launch "$@"`.

PROGRAM="$(basename "$0")"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"

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

common_usage() {
    cat <<'TEXT'

Environment:
  NPROC_PER_NODE   processes on this machine (default 1; more start torchrun)
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun
  PYTHON, MEGATRON_OFFLOAD_PYTHON               see tools/bootstrap.sh

Flags of the trainer:

TEXT
}

build_quickstart_corpus() {
    local data="$CORPUS/corpus_text_$LEVEL"
    if [[ -r "$CORPUS/tokenizer.json" && -r "$data.bin" && -r "$data.idx" ]]; then
        return
    fi
    echo "$PROGRAM: preparing $CORPUS_IS in $CORPUS" >&2
    "$PYTHON" "$ROOT/tools/preprocess_data.py" --stdlib "${CORPUS_FLAGS[@]}" \
        --output-prefix "$CORPUS/corpus" >&2
}

# On a CPU, memory that offload frees leaves the process only with an allocator that returns it; on a GPU
# it stays in pieces that may fit nothing unless segments expand. Both have to be chosen before Python
# starts. What the caller has set stays as it is.
use_allocator() {
    local settings="$ROOT/megatron/offload/machine/allocator.py" line
    if [[ -e /dev/nvidiactl ]]; then
        expandable_segments
        return
    fi
    if [[ "$(flag_value --activation-offload ssd "$@")" == off ]]; then
        return
    fi
    while IFS= read -r line; do
        [[ -v "${line%%=*}" ]] || export "${line?}"
    done < <("$PYTHON" -I "$settings")
}

launch() {
    local trainer="$ROOT/examples/pretrain_$MODEL.py" train_iters flags processes nodes torchrun
    # shellcheck source=tools/bootstrap.sh
    source "$ROOT/tools/bootstrap.sh"
    bootstrap

    if has_flag --help "$@" || has_flag -h "$@"; then
        usage
        common_usage
        exec "$PYTHON" "$trainer" --help
    fi

    train_iters="$(flag_value --train-iters 100 "$@")"
    flags=(
        "${MODEL_FLAGS[@]}"
        --attention-dropout 0 --hidden-dropout 0
        --train-iters 100 --clip-grad 1.0
        --log-interval 1 --eval-interval 50 --eval-iters 4
        --activation-offload ssd --activation-offload-dir "$ROOT/runs/offload"
    )
    # A fixed warm-up, so that a run may be prolonged; none where the run is no longer than it.
    if [[ "$train_iters" =~ ^[0-9]+$ ]] && ((10#$train_iters > 5)); then
        flags+=(--lr-warmup-iters 5)
    fi
    if ! has_flag --data-path "$@" && ! has_flag --mock-data "$@"; then
        build_quickstart_corpus
        flags+=(--data-path "$CORPUS/corpus_text_$LEVEL" --tokenizer-model "$CORPUS/tokenizer.json")
    fi
    if ! has_flag --metrics-file "$@" && ! has_flag --save "$@"; then
        # With the process, as two runs may begin in one second.
        flags+=(--metrics-file "$ROOT/runs/$MODEL-$(date +%Y%m%d-%H%M%S)-$$/metrics.jsonl")
    fi
    mkdir -p "$ROOT/runs/offload"
    use_allocator "$@"

    processes="${NPROC_PER_NODE:-1}" nodes="${NNODES:-1}"
    if ! [[ "$processes" =~ ^[1-9][0-9]*$ && "$nodes" =~ ^[1-9][0-9]*$ ]]; then
        echo "$PROGRAM: error: NPROC_PER_NODE and NNODES must be positive whole numbers," \
            "got $processes and $nodes" >&2
        exit 2
    fi
    if ((processes * nodes == 1)); then
        exec "$PYTHON" "$trainer" "${flags[@]}" "$@"
    fi

    # One process checks the flags first: its sentence and exit code 2 would drown in torchrun's
    # report.
    RANK=0 WORLD_SIZE=$((processes * nodes)) LOCAL_RANK=0 LOCAL_WORLD_SIZE="$processes" \
        "$PYTHON" "$trainer" "${flags[@]}" "$@" --validate-only
    if has_flag --validate-only "$@"; then
        exit 0
    fi
    torchrun=(-m torch.distributed.run --nproc-per-node "$processes")
    if ((nodes == 1)) && [[ -z "${MASTER_PORT:-}" ]]; then
        torchrun+=(--standalone) # picks a free port
    else
        torchrun+=(--nnodes "$nodes" --node-rank "${NODE_RANK:-0}"
            --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
    fi
    exec "$PYTHON" "${torchrun[@]}" "$trainer" "${flags[@]}" "$@"
}
