#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the environment that every command of this repository runs in.
#   source tools/bootstrap.sh; bootstrap   sets PYTHON to an interpreter with everything installed
#   tools/bootstrap.sh                     the same, from the command line
#   source tools/bootstrap.sh; bootstrap_frameworks   afterwards: transformers, DeepSpeed, Lightning too
#   source tools/bootstrap.sh; bootstrap_next   sets NEXT_PYTHON: the same with a newer PyTorch, for tests
# It creates .venv, installs the versions named in tools/constraints.txt and this package (editable),
# and leaves a stamp. While the stamp fits, a start costs one checksum. Two starts at once: the second
# waits for the first. An installation that was interrupted is thrown away and made again.
# .venv-next has the versions of tools/constraints-next.txt in place of those.
#   PYTHON=...                   the Python to make .venv from (3.11 to 3.13)
#   MEGATRON_OFFLOAD_PYTHON=...  use this interpreter as it is and install nothing (containers)

OFFLOAD_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
_venv=.venv # or .venv-next
_extras=dev

_say() { printf 'bootstrap: %s\n' "$*" >&2; }

_fail() {
    _say "error: $*"
    exit 2
}

# The versions wanted and the place: a moved checkout gets a new environment, its scripts name their path.
_wanted_stamp() {
    local sum
    sum="$(cd "$OFFLOAD_ROOT" && cat tools/constraints*.txt pyproject.toml setup.py tools/bootstrap.sh | sha256sum)"
    printf '%s %s' "${sum%% *}" "$OFFLOAD_ROOT"
}

_is_ready() {
    local venv="$OFFLOAD_ROOT/$_venv"
    [[ -x "$venv/bin/python" && -r "$venv/.bootstrap-stamp" && ! -e "$venv/.bootstrap-incomplete" ]] || return 1
    [[ "$(<"$venv/.bootstrap-stamp")" == "$1" ]]
}

_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

_find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        _fits "$PYTHON" || _fail "PYTHON=$PYTHON is not a Python 3.11 to 3.13; set PYTHON to one that is"
        command -v "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 python3.13 python; do
        if _fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    _fail "no Python 3.11 to 3.13 found; install one (with its venv module) or set PYTHON to its path"
}

# pip's lines about large downloads and about what it installed; the whole output is in the log. Python makes
# bytecode of what it imports, and keeps it; pip would make it of ten times as many files, for minutes.
_pip() {
    local venv="$OFFLOAD_ROOT/$_venv" log="$OFFLOAD_ROOT/$_venv/bootstrap.log"
    local bytecode=--no-compile
    if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then bytecode=--compile; fi
    if ! env -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PIP_REQUIRE_VIRTUALENV \
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$bytecode" \
        --constraint "$venv/constraints.txt" "$@" 2>&1 |
        tee -a "$log" | sed -n -u 's/^ *\(Downloading .*[MG]B)\).*/bootstrap:   \1/p' >&2; then
        grep -v '^WARNING' "$log" | tail -n 15 >&2 || true
        _fail "pip could not install the environment; the whole output is in $log"
    fi
}

# The pins; for .venv-next those of constraints-next.txt in place of the ones of the same names.
_constraints() {
    local next="$OFFLOAD_ROOT/tools/constraints-next.txt" names
    if [[ "$_venv" == .venv ]]; then
        cat "$OFFLOAD_ROOT/tools/constraints.txt"
        return
    fi
    names="$(sed -n 's/^\([^#=]*\)==.*/\1/p' "$next" | paste -sd '|')"
    grep -vE "^($names)==" "$OFFLOAD_ROOT/tools/constraints.txt"
    cat "$next"
}

_install() {
    local venv="$OFFLOAD_ROOT/$_venv" wanted="$1" base started=$SECONDS
    if [[ -e "$venv/.bootstrap-incomplete" ]]; then
        _say "an earlier installation was interrupted; starting again"
        rm -rf "$venv"
    fi
    if ! _fits "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        base="$(_find_python)" || exit 2
        _say "creating $_venv with $("$base" --version 2>&1)"
        "$base" -c 'import venv, ensurepip' 2>/dev/null ||
            _fail "$base has no venv module; install it (on Debian and Ubuntu: the package python3-venv)"
        mkdir -p "$venv"
        : >"$venv/.bootstrap-incomplete"
        "$base" -m venv "$venv" || _fail "$base could not create $venv"
    fi
    : >"$venv/.bootstrap-incomplete"
    : >"$venv/bootstrap.log"
    _constraints >"$venv/constraints.txt"
    _say "installing $(grep '^torch==' "$venv/constraints.txt"), megatron-core and tools at pinned versions into $_venv (minutes the first time)"
    # setuptools first and without build isolation: the build then uses the pinned version too.
    _pip setuptools
    _pip --no-build-isolation --editable "${OFFLOAD_ROOT}[$_extras]"
    printf '%s\n' "$wanted" >"$venv/.bootstrap-stamp"
    rm "$venv/.bootstrap-incomplete"
    _say "ready in $((SECONDS - started)) s: $("$venv/bin/python" -c '
import importlib.metadata as m, platform
names = ("torch", "megatron-core")
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in names))')"
}

_install_once() {
    local wanted locker
    wanted="$(_wanted_stamp)"
    exec 9>"$OFFLOAD_ROOT/.bootstrap${_venv#.venv}.lock"
    locker="$(_find_python)" || exit 2
    # The lock belongs to file descriptor 9, not to the process that asked for it.
    if ! "$locker" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        _say "another start is installing the environment; waiting for it"
        "$locker" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    fi
    if ! _is_ready "$wanted"; then
        _install "$wanted"
    fi
}

# Sets PYTHON.
bootstrap() {
    if [[ -n "${MEGATRON_OFFLOAD_PYTHON:-}" ]]; then
        [[ -x "$(command -v "$MEGATRON_OFFLOAD_PYTHON")" ]] ||
            _fail "MEGATRON_OFFLOAD_PYTHON=$MEGATRON_OFFLOAD_PYTHON is not an executable"
        PYTHON="$(command -v "$MEGATRON_OFFLOAD_PYTHON")"
        return
    fi
    if ! _is_ready "$(_wanted_stamp)"; then
        # A process of its own: in a function called as a condition, "set -e" would have no effect.
        bash "$OFFLOAD_ROOT/tools/bootstrap.sh" --install || exit $?
    fi
    PYTHON="$OFFLOAD_ROOT/.venv/bin/python"
}

# After `bootstrap`: also the frameworks that integrations are for. False, with the reason, where it cannot.
bootstrap_frameworks() {
    local wanted stamp="$OFFLOAD_ROOT/.venv/.frameworks-stamp"
    if [[ -n "${MEGATRON_OFFLOAD_PYTHON:-}" ]]; then
        _say "MEGATRON_OFFLOAD_PYTHON is used as it is; frameworks are not installed into it"
        return 1
    fi
    wanted="$(_wanted_stamp)"
    if [[ ! -r "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
        bash "$OFFLOAD_ROOT/tools/bootstrap.sh" --install-frameworks || return 1
    fi
}

# After `bootstrap`: sets NEXT_PYTHON. False, with the reason, where that PyTorch cannot be installed.
bootstrap_next() {
    if [[ -n "${MEGATRON_OFFLOAD_PYTHON:-}" ]]; then
        _say "MEGATRON_OFFLOAD_PYTHON is used as it is; .venv-next is not made beside it"
        return 1
    fi
    bash "$OFFLOAD_ROOT/tools/bootstrap.sh" --install-next || return 1
    # shellcheck disable=SC2034 # for the script that has sourced this
    NEXT_PYTHON="$OFFLOAD_ROOT/.venv-next/bin/python"
}

# On a GPU: what is freed can be used again whatever its size, unless the caller has settings of their own.
expandable_segments() {
    if [[ ! -v PYTORCH_CUDA_ALLOC_CONF && ! -v PYTORCH_ALLOC_CONF ]]; then
        export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    fi
}

# After `bootstrap`: what is started from here gives memory back when it is freed, on a CPU to the system.
offload_allocator() {
    local settings
    if command -v nvidia-smi >/dev/null; then
        expandable_segments
        return
    fi
    settings="$("$PYTHON" -m megatron.offload.machine.allocator)"
    if [[ -n "$settings" ]]; then
        while IFS= read -r setting; do export "${setting?}"; done <<<"$settings"
    fi
}

_install_frameworks() {
    local venv="$OFFLOAD_ROOT/.venv" started=$SECONDS wanted
    wanted="$(_wanted_stamp)"
    exec 9>"$OFFLOAD_ROOT/.bootstrap.lock"
    "$venv/bin/python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    _say "installing transformers, DeepSpeed and Lightning at pinned versions"
    # DeepSpeed is built here, without its CUDA operators, and looks at the PyTorch that is installed.
    DS_BUILD_OPS=0 _pip --no-build-isolation --editable "${OFFLOAD_ROOT}[dev,frameworks]"
    # For tests that name it: in the environment itself, frameworks would find it and act otherwise. Not among the
    # pins: PyTorch for CUDA asks for a version of its own.
    rm -rf "$venv/triton"
    _pip --target "$venv/triton" --no-deps triton==3.9.0
    printf '%s\n' "$wanted" >"$venv/.frameworks-stamp"
    _say "frameworks ready in $((SECONDS - started)) s"
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    set -euo pipefail
    if [[ "${1:-}" == --install ]]; then
        _install_once
        exit 0
    fi
    if [[ "${1:-}" == --install-frameworks ]]; then
        _install_frameworks
        exit 0
    fi
    if [[ "${1:-}" == --install-next ]]; then
        # As a user has it: without what checks the sources. Of the Python of .venv.
        _venv=.venv-next _extras=test PYTHON="$OFFLOAD_ROOT/.venv/bin/python"
        _is_ready "$(_wanted_stamp)" || _install_once
        exit 0
    fi
    bootstrap
    printf '%s\n' "$PYTHON"
fi
