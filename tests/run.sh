#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs every check: lint, format, types, shell scripts, Dockerfile, tests. Arguments go to pytest:
#   tests/run.sh                     all tests but those that take seconds
#   tests/run.sh -k forwarding -x    some of the tests (lint and types still run)
#   tests/run.sh --slow              all tests, as .ci/run does
#   tests/run.sh --rare              also more layouts of what is tested anyway
#   tests/run.sh --next              also a part of the tests with the PyTorch of tools/constraints-next.txt, in an
#                                    environment of its own (6 GB)
#   tests/run.sh --lag               only tests/behaviour and tests/autograd, on the test accelerator
# All checks run even if one fails; the exit code is 0 only if all passed.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=tools/bootstrap.sh
source "$ROOT/tools/bootstrap.sh"
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules: each is compiled once
bootstrap
cd "$ROOT"

# A device whose streams lag behind (tests/support/lag), instead of the CPU.
if [[ "${1:-}" == --lag ]]; then
    bootstrap_frameworks || true # the tests that need them say so
    exec "$PYTHON" -m pytest -p tests.support.lag.plugin tests/behaviour tests/autograd "${@:2}"
fi

has_next=false
if [[ "${1:-}" == --next ]]; then
    has_next=true
    shift
fi

# pip has use for one core: beside what checks the sources alone, and beside itself. Whether it could install
# the newer PyTorch is asked again where that is wanted.
bootstrap_frameworks &
installing=$!
if [[ "$has_next" == true ]]; then bootstrap_next &>/dev/null & fi

failed=()
failures=() # the tests, again at the end, where they are seen
durations=()

check() {
    local name="$1" started=$SECONDS took='' outcome=passed
    shift
    printf '\n== %s\n' "$name"
    if ! "$@"; then
        outcome=FAILED
        failed+=("$name")
    fi
    durations+=("$(printf '%-12s %s in %4d s' "$name" "$outcome" "${took:-$((SECONDS - started))}")")
}

note_failures() {
    local status="$1" output="$2" line
    while IFS= read -r line; do
        failures+=("$line")
    done < <(grep -E '^(FAILED|ERROR) ' "$output")
    if ((status > 128)); then
        failures+=("signal $((status - 128)) ended pytest: $(tail -n 1 "$output")")
    fi
}

# Processes side by side: two cores wait for drives, devices and other processes then. That of tests/unit prints
# as it runs, between all other checks. Each of the others runs the tests of some directories in turn; they and
# what follows tests/unit end at about the same time, but for that of compiled graphs. What they print comes then.
run=("$PYTHON" -m pytest --durations=10)
declare -A directories=(
    [behaviour]='autograd behaviour' [lag]=lag [megatron]=megatron [compiled]=compiled [integrations]=integrations
)
in_turn=(integrations behaviour 'lag megatron' compiled)
processes=()
has_tests=false

# Runs the tests of some directories: its arguments are their names, --, and flags of pytest.
tests_of() {
    local path
    local -a named=() left_out=()
    while [[ "$1" != -- ]]; do
        named+=("$1")
        shift
    done
    for path in tests/*/; do
        path="${path%/}"
        if [[ " ${named[*]} " != *" ${path#tests/} "* ]]; then left_out+=("--ignore=$path"); fi
    done
    "${run[@]}" "${@:2}" "${left_out[@]}"
}

# Runs the tests of several names in turn, each with a file of what they print and one of how they ended.
run_in_turn() {
    local name started status
    for name in $1; do
        started=$SECONDS status=0
        # shellcheck disable=SC2086 # several directories
        tests_of ${directories[$name]} -- "${@:2}" >"$printed/$name" 2>&1 || status=$?
        printf '%s %s\n' "$status" $((SECONDS - started)) >"$printed/$name.ended"
    done
}

begin_others() {
    local names
    printed="$(mktemp -d)"
    set -m # each is a process group of its own, which Ctrl-C does not reach
    for names in "${in_turn[@]}"; do
        run_in_turn "$names" "$@" &
        processes+=($!)
    done
    set +m
    trap 'kill -- "${processes[@]/#/-}" 2>/dev/null; rm -rf "$printed"' EXIT
}

# What pytest's exit status says: 5, that no test was selected, is an error where nothing else ran either.
ended() {
    local status="$1" output="$2"
    note_failures "$status" "$output"
    if ((status != 5)); then has_tests=true; fi
    return $((status == 5 ? 0 : status))
}

unit() {
    local status=0
    tests_of unit frozen -- "$@" | tee "$printed/unit" || status=${PIPESTATUS[0]}
    ended "$status" "$printed/unit"
}

background() {
    local name="$1" status=1
    cat "$printed/$name"
    read -r status took <"$printed/$name.ended" || true # no such file: the process was killed
    ended "$status" "$printed/$name"
}

# What meets the inner side of PyTorch, which differs between releases: in one process.
next_tests() {
    local status=0
    "$NEXT_PYTHON" -m pytest --durations=5 tests/autograd/test_checkpoints_and_functions.py \
        tests/behaviour/test_{casts_of_weights,hooks_of_others,in_place_changes_raise,layer_major_*}.py \
        tests/behaviour/test_{optimizer_steps,parameter_offload,parameters_that_others_write}.py \
        tests/behaviour/test_{every_tier_gives_the_same_bits,storage_moves_once,what_*}.py \
        tests/unit/test_{autograd_graph,layer_major,parameter_unit,record,set_aside,what_can_move}.py \
        tests/compiled/test_compiled_graphs.py::test_{a_graph_has_the_same_bits,two_lengths_in_turn} \
        "$@" || status=$?
    return $((status == 5 ? 0 : status)) # 5: none of the selected tests is among these
}

if ! "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "tests: no CUDA device here; tests marked gpu are skipped and say so"
fi
# The planner's simulation is compiled when it first runs, and so is the test accelerator, for half a
# minute each: here, beside the checks that leave a core idle, instead of in several tests at a time.
"$PYTHON" -m megatron.offload.cli plan --hardware h100 --num-layers 2 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --global-batch-size 2 \
    --activation-memory-budget 1GiB &>/dev/null &
compiling=$!
"$PYTHON" -m tests.support.lag &>/dev/null &
building=$!
check lint "$PYTHON" -m ruff check .
check format "$PYTHON" -m ruff format --check .
beside="$(dirname "$PYTHON")"
if [[ -x "$beside/shellcheck" ]]; then
    check shell "$beside/shellcheck" -x .ci/run tests/run.sh tools/bootstrap.sh \
        examples/*.sh examples/*/*.sh examples/*/*.sbatch
else
    echo "tests: no shellcheck beside $PYTHON; the shell scripts are not checked"
fi
if [[ -x "$beside/hadolint" ]]; then
    check docker "$beside/hadolint" Dockerfile
else
    echo "tests: no hadolint beside $PYTHON; the Dockerfile is not checked"
fi
wait "$compiling" "$building" || true # the tests would say what is wrong
wait "$installing" || echo "tests: tests of transformers, DeepSpeed and Lightning are skipped"
begin_others "$@"
if "$PYTHON" -c 'import torch, sys; sys.exit("torch==" + torch.__version__.split("+")[0] not in open(sys.argv[1]).read().split())' \
    tools/constraints.txt; then
    check types "$PYTHON" -m mypy megatron/offload
else
    echo "tests: types are checked with the PyTorch of tools/constraints.txt alone; others describe themselves otherwise"
fi
check unit unit "$@"
if [[ "$has_next" == false ]]; then
    printf '\ntests: nothing was run with %s, as --next does\n' "$(grep '^torch==' tools/constraints-next.txt)"
elif bootstrap_next; then
    check next next_tests "$@"
else
    echo "tests: nothing was run with $(grep '^torch==' tools/constraints-next.txt), which is not installed"
fi
wait "${processes[@]}" || true # how each ended stands in its file
trap 'rm -rf "$printed"' EXIT
for one in lag megatron compiled integrations behaviour; do
    check "$one" background "$one"
done
if [[ "$has_tests" == false ]]; then
    failed+=(tests)
    failures+=("no test was selected: $*")
fi

printf '\n'
printf '%s\n' "${durations[@]}"
if ((${#failed[@]})); then
    printf '%s\n' "${failures[@]}" >&2
    printf 'tests: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
