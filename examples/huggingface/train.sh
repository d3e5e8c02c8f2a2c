#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a small Llama with transformers' Trainer, its activations on the SSD; on a CPU in a minute.
# Installs what is missing into .venv. Arguments go to train.py:
#   examples/huggingface/train.sh --lora
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=tools/bootstrap.sh
source "$ROOT/tools/bootstrap.sh"
bootstrap
if [[ -z "${MEGATRON_OFFLOAD_PYTHON:-}" ]]; then bootstrap_frameworks; fi
offload_allocator
exec "$PYTHON" "$ROOT/examples/huggingface/train.py" "$@"
