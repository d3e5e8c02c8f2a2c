#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a small Llama with DeepSpeed's ZeRO 3, its activations on the SSD; on a CPU in a minute.
# The first start takes some five: it installs what is missing into .venv (MEGATRON_OFFLOAD_PYTHON: an
# interpreter that has everything), and DeepSpeed compiles. Arguments go to train.py; processes:
#   NPROC_PER_NODE=4 examples/deepspeed/train.sh --steps 20
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=tools/bootstrap.sh
source "$ROOT/tools/bootstrap.sh"
bootstrap
if [[ -z "${MEGATRON_OFFLOAD_PYTHON:-}" ]]; then bootstrap_frameworks; fi
offload_allocator
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${NPROC_PER_NODE:-2}" \
    "$ROOT/examples/deepspeed/train.py" "$@"
