#!/usr/bin/env bash
# Compiles the native core and its tests in C++ for a sanitizer, and runs them over one host and over several:
#   tests/native/sanitize.sh [--build] address,undefined|thread [epochs [seed]]
# With --build it does not run it.
# Called by `make sanitize`, from the repository's root, with .venv in place. Needs no Python.
set -euo pipefail

build_only=
if [ "$1" = --build ]; then
    build_only=1
    shift
fi
sanitizer=$1
epochs=${2:-10}
seed=${3:-1}
fuzz=15 # seconds; other processes' damaged bytes, which race with their readers: nothing for TSan
build=build/sanitize-${sanitizer%%,*}
PATH=$PWD/.venv/bin:$PATH
launcher=$(command -v ccache || true) # spares the second build of the same sources, where it is installed
# -O1 keeps stacks readable; kernels have their own flags.
cmake -S native -B "$build" -G Ninja -DRING_BUILD_TESTS=ON -DRING_SANITIZE="$sanitizer" -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_CXX_FLAGS=-O1 -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" >/dev/null
cmake --build "$build"
[ -z "$build_only" ] || exit 0

# Where the communicators of the fake NCCL meet.
TMPDIR=$(mktemp -d)
trap 'rm -r "$TMPDIR"' EXIT
export TMPDIR FAKE_CUDA_delay_us=50 FAKE_NCCL_kernel_us=200
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 TSAN_OPTIONS=halt_on_error=1
[ "$sanitizer" = thread ] || "$build/ring_tests" --fuzz "$fuzz" "$seed"
"$build/ring_tests" --faults
"$build/ring_tests" "$epochs" 4 1 "$seed"
"$build/ring_tests" "$epochs" 7 1 "$seed" --past-cache
"$build/ring_tests" "$epochs" 5 2 "$seed"
"$build/ring_tests" "$epochs" 6 3 "$seed"
"$build/ring_tests" "$epochs" 3 1 "$seed" --devices
"$build/ring_tests" "$epochs" 4 2 "$seed" --devices
