#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains with one of the settings in examples/gpt, examples/bert and examples/t5: on one machine, or as
# one node of several. Every node runs the same command; train.sbatch does that under Slurm.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"

usage() {
    cat <<'TEXT'
Usage: examples/cluster/train.sh [--print] SETTINGS [FLAGS OF THE TRAINER]

    OFFLOAD_DIR=/nvme0/offload examples/cluster/train.sh examples/gpt/7b.sh --train-iters 1000

Flags given here come after those of the settings and win over them. --print shows the command of this
node and starts nothing.

Environment:
  OFFLOAD          off, ssd, host, tiered or auto (default ssd); auto uses OFFLOAD_DIR if it is set
  OFFLOAD_DIR      directory on a local NVMe drive, or several on several drives: /nvme0/x,/nvme1/x
  DATA_PATH        prefix of the .bin/.idx files; without it GPT gets made-up tokens (--mock-data)
  TOKENIZER_MODEL  what the data was made with (HuggingFaceTokenizer)
  SAVE             directory for checkpoints; a run goes on from the last one in it
  MEGATRON_LM      a Megatron-LM checkout, whose pretrain_*.py is run instead of the bundled trainer;
                   with it the interpreter is python3 unless MEGATRON_OFFLOAD_PYTHON says otherwise
  NNODES, NPROC_PER_NODE                number of nodes and GPUs of each, where the settings' do not fit
  NODE_RANK, MASTER_ADDR, MASTER_PORT   with several nodes: this node's number, node 0 and a free port
  PYTHON, MEGATRON_OFFLOAD_PYTHON       see tools/bootstrap.sh
TEXT
}

fail() {
    echo "train.sh: error: $*" >&2
    exit 2
}

if (($# == 0)) || [[ "$1" == --help || "$1" == -h ]]; then
    usage
    exit 0
fi
print=0
if [[ "$1" == --print ]]; then
    print=1
    shift
fi
settings="${1:-}"
[[ "$settings" == *.sh && -r "$settings" ]] ||
    fail "there are no settings '$settings'; give one of the files in examples/gpt, examples/bert or examples/t5"
shift

# Sets MODEL, NNODES, NPROC_PER_NODE, VOCAB_SIZE, FLAGS and perhaps MEGATRON_LM_FLAGS.
MEGATRON_LM_FLAGS=()
# shellcheck source=examples/gpt/345m.sh
source "$settings"
[[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ && "$NNODES" =~ ^[1-9][0-9]*$ ]] ||
    fail "NPROC_PER_NODE and NNODES must be positive whole numbers, got $NPROC_PER_NODE and $NNODES"

# For every model: bfloat16 with gradients in fp32, optimizer states divided among the data-parallel
# ranks, and communication of gradients and weights while the step computes.
flags=(
    "${FLAGS[@]}"
    --bf16
    --accumulate-allreduce-grads-in-fp32
    --use-distributed-optimizer
    --overlap-grad-reduce
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
)
# Parameters that wait on a tier are gathered when their unit is used, not ahead of it.
[[ " $* " == *" --parameter-offload"[\ =]* ]] || flags+=(--overlap-param-gather)

# --- activations
OFFLOAD="${OFFLOAD:-ssd}"
flags+=(--activation-offload "$OFFLOAD")
if [[ "$OFFLOAD" == ssd || "$OFFLOAD" == tiered ]]; then
    # No default: the repository often lies on a network file system, the worst place for this.
    [[ -n "${OFFLOAD_DIR:-}" ]] ||
        fail "OFFLOAD=$OFFLOAD needs a place; set OFFLOAD_DIR to a directory on a local NVMe drive"
    flags+=(--activation-offload-dir "$OFFLOAD_DIR")
elif [[ "$OFFLOAD" == auto && -n "${OFFLOAD_DIR:-}" ]]; then
    flags+=(--activation-offload-dir "$OFFLOAD_DIR")
fi

# --- data
if [[ -n "${DATA_PATH:-}" ]]; then
    flags+=(--data-path "$DATA_PATH")
else
    [[ "$MODEL" == gpt ]] ||
        fail "only GPT has mock data; set DATA_PATH and TOKENIZER_MODEL to what preprocess_data.py has made"
    flags+=(--mock-data)
fi
if [[ -n "${TOKENIZER_MODEL:-}" ]]; then
    flags+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
else
    flags+=(--tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
fi

# --- checkpoints
if [[ -n "${SAVE:-}" ]]; then
    flags+=(--save "$SAVE" --save-interval 1000)
    if [[ -r "$SAVE/latest_checkpointed_iteration.txt" ]]; then
        flags+=(--load "$SAVE")
    fi
fi

# --- the trainer
if [[ -n "${MEGATRON_LM:-}" ]]; then
    trainer=(-m megatron.offload.launch "$MEGATRON_LM/pretrain_$MODEL.py")
    flags+=("${MEGATRON_LM_FLAGS[@]}")
    # The checkout first: its megatron.core wins over an installed one.
    export PYTHONPATH="$MEGATRON_LM:$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    export MEGATRON_OFFLOAD_PYTHON="${MEGATRON_OFFLOAD_PYTHON:-python3}"
else
    trainer=("$ROOT/examples/pretrain_$MODEL.py")
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
fi

# --- the processes of this node
launch=(-m torch.distributed.run --nproc-per-node "$NPROC_PER_NODE")
if ((NNODES > 1)); then
    [[ -n "${NODE_RANK:-}" && -n "${MASTER_ADDR:-}" ]] ||
        fail "$NNODES nodes need NODE_RANK (0 to $((NNODES - 1))) and MASTER_ADDR (the address of node 0)"
    launch+=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
    launch+=(--standalone --local-addr 127.0.0.1) # picks a free port, needs no name service
fi
# Tensor parallelism overlaps rightly only if kernels start in the order in which they were queued.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# shellcheck source=tools/bootstrap.sh
source "$ROOT/tools/bootstrap.sh"
expandable_segments
if ((print)); then # of a machine that need not have the environment
    printf '%q ' "${MEGATRON_OFFLOAD_PYTHON:-$ROOT/.venv/bin/python}" \
        "${launch[@]}" "${trainer[@]}" "${flags[@]}" "$@"
    printf '\n'
    exit 0
fi
bootstrap
[[ -r "${trainer[-1]}" ]] || fail "there is no ${trainer[-1]}"
if [[ -n "${OFFLOAD_DIR:-}" ]]; then
    IFS=, read -r -a directories <<<"$OFFLOAD_DIR"
    mkdir -p "${directories[@]}"
fi
# One process checks the flags first: its sentence and exit code 2 would drown in torchrun's report.
if [[ -z "${MEGATRON_LM:-}" && "${NODE_RANK:-0}" == 0 ]]; then
    RANK=0 WORLD_SIZE=$((NNODES * NPROC_PER_NODE)) LOCAL_RANK=0 LOCAL_WORLD_SIZE="$NPROC_PER_NODE" \
        "$PYTHON" "${trainer[@]}" "${flags[@]}" "$@" --validate-only
fi
exec "$PYTHON" "${launch[@]}" "${trainer[@]}" "${flags[@]}" "$@"
