#!/usr/bin/env bash
# Runs the tests of the native core, ranks as threads, with a core compiled for a sanitizer:
#   tests/native/sanitize.sh address,undefined|thread [pytest arguments]
# Called by `make sanitize`, from the repository's root, with .venv in place.
set -euo pipefail

sanitizer=$1
shift
home=build/sanitize-${sanitizer%%,*}
if [ ! -x "$home/bin/python" ]; then
    .venv/bin/python -m venv --without-pip "$home"
fi
# The packages of .venv, but not its editable install of this one: that would bring the ordinary core.
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" >"$own/packages.pth"
PATH=$PWD/.venv/bin:$PATH "$home/bin/python" -m pip install -q --no-deps --no-build-isolation --force-reinstall \
    --prefix "$home" -C build-dir="$home/cmake" -C cmake.define.RING_SANITIZE="$sanitizer" \
    -C cmake.build-type=None -C cmake.define.CMAKE_CXX_FLAGS=-O1 .

library=lib${sanitizer%%,*}
library=${library/libaddress/libasan}
library=${library/libthread/libtsan}
# Python is not compiled for the sanitizer, so its runtime has to be there before Python is. Python frees nothing at
# its end (no leak check), and throws C++ exceptions across libraries that the runtime must have seen first.
export LD_PRELOAD="$(c++ -print-file-name="$library.so") $(c++ -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:halt_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1"
# Left out: ranks as processes, which fork after the runtime has started, and tests that measure a process's heap and
# descriptors, which are the runtime's then.
cd tests
exec "../$home/bin/python" -m pytest -c ../pyproject.toml --rootdir .. -p no:cacheprovider -k "not process" \
    --ignore native/test_lifetime.py --ignore native/test_death.py "$@" native
