#!/usr/bin/env bash
# Installs Ring Notebook beside other versions of torch and Python, and runs what depends on them most:
#   tests/versions/run.sh OLDEST_PYTHON NEWEST_PYTHON [pytest's options]
# Each of oldest.txt, newest.txt and nightly.txt gets an environment in .versions; what cannot be had is said at the end.
# Called by `make test-versions`, from the repository's root.
set -euo pipefail

oldest=$1
newest=$2
shift 2
tests=(tests/unit/torch tests/ranks/collectives tests/ranks/optimizer tests/ranks/process_group tests/ranks/training
    tests/notebook/run/test_torch_distributed.py tests/notebook/run/test_failures.py
    tests/notebook/cluster/test_heal.py)
results=()
failed=0

# NAME PYTHON: the environment, with its torch as new as NAME.txt lets it be. Returns 1 where it cannot be had.
install() {
    local bin=.versions/$1/bin
    command -v "$2" >/dev/null || { results+=("NOT TESTED: $1: there is no $2 here"); return 1; }
    [ -x "$bin/python" ] || "$2" -m venv ".versions/$1" || return 1
    "$bin/pip" install -q --upgrade -r "tests/versions/$1.txt" \
        || { results+=("NOT TESTED: $1: pip cannot get what tests/versions/$1.txt asks for"); return 1; }
    if [ "$1" = nightly ] && ! "$bin/python" -c 'import torch; raise SystemExit(".dev" not in torch.__version__)'; then
        results+=("NOT TESTED: nightly: pip found a released torch and no nightly one")
        return 1
    fi
    "$bin/pip" install -q -e '.[test]' || { results+=("FAILED: $1: Ring Notebook does not install there"); return 1; }
}

try() {
    local bin=.versions/$1/bin what
    what="$1: $("$bin/python" -W ignore -c 'import platform, torch; print("torch", torch.__version__, "on Python", platform.python_version())')"
    echo "== $what"
    if "$bin/python" -m pytest "${tests[@]}" "${@:2}" && "$bin/python" notebooks/demo.py; then
        results+=("passed: $what")
    else
        results+=("FAILED: $what")
        failed=1
    fi
}

install oldest "$oldest" && try oldest "$@" || failed=1
install newest "$newest" && try newest "$@" || failed=1
# Nobody can promise that there is one today.
if install nightly "$newest"; then try nightly "$@"; fi
printf '%s\n' "${results[@]}"
exit "$failed"
