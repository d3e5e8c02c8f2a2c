#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fills a folder with the wheels that tools/gpu_day.py wants and a machine with PyTorch and transformers may lack:
#   tools/gpu_wheels.sh FOLDER
# for Python 3.12 on x86-64, without what they ask for in turn. The folder travels to a machine that reaches no
# network; there, without installing anything elsewhere:
#   python3 -m pip install -q --no-index --no-deps --no-compile --target SITE FOLDER/*.whl
#   PYTHONPATH=SITE:. python3 tools/gpu_day.py ...
#   PYTHON=...   the Python whose pip downloads (default: that of .venv, else python3)
# The versions are those of tools/constraints.txt. Exit code 1: a wheel could not be had, or the folder is too large.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
MOST_MIB=64
# msgspec: the package itself. megatron-core: gpu_check. trl, liger-kernel: what ours is compared with. kvikio and what
# it needs, for CUDA 13: io="gds"; cuFile and CuPy have to be there.
PINNED=(msgspec megatron-core trl)
OTHERS=(liger-kernel==0.8.0 kvikio-cu13==26.10.0 libkvikio-cu13==26.10.0 rapids-logger==0.3.0)

fail() {
    printf 'gpu_wheels: error: %s\n' "$*" >&2
    exit 1
}

[[ $# -eq 1 && "$1" != -* ]] || fail "give one folder: tools/gpu_wheels.sh FOLDER"
folder="$1"
python="${PYTHON:-$ROOT/.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
mkdir -p "$folder"

wanted=("${OTHERS[@]}")
for name in "${PINNED[@]}"; do
    pin="$(grep -E "^$name==" "$ROOT/tools/constraints.txt")" || fail "tools/constraints.txt has no version of $name"
    wanted+=("$pin")
done

rm -f "$folder"/*.whl # two versions of one package stop the whole installation
platforms=()
for platform in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 \
    manylinux2014 manylinux1; do
    platforms+=(--platform "${platform}_x86_64")
done
"$python" -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version 3.12 "${platforms[@]}" --dest "$folder" "${wanted[@]}" ||
    fail "pip could not download ${wanted[*]}"

bytes="$(cat "$folder"/*.whl | wc -c)"
ls "$folder"/*.whl
printf 'gpu_wheels: %d.%d MiB in %d wheels\n' $((bytes >> 20)) $((bytes % 1048576 * 10 / 1048576)) \
    "$(find "$folder" -mindepth 1 -name '*.whl' | wc -l)"
((bytes <= MOST_MIB << 20)) || fail "$folder has more than $MOST_MIB MiB, the most that can be carried along"
