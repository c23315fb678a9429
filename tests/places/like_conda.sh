#!/usr/bin/env bash
# Compiles the CPython of Debian's sources as conda's are: against headers of an old C library, so without os.pidfd_open,
# os.memfd_create and others: `like_conda.sh FOLDER`; the interpreter is FOLDER/python/bin/python3. A few minutes, once.
set -euo pipefail
mkdir -p "$1"
cd "$1"
[ -x python/bin/python3 ] && exit
cat > sources.list <<'LIST'
deb-src http://deb.debian.org/debian bookworm main
LIST
mkdir -p lists
options=(-o Dir::Etc::SourceList="$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::lists="$PWD/lists" -o APT::Sandbox::User=root)
apt-get "${options[@]}" update -qq
apt-get "${options[@]}" source -qq python3.11 > /dev/null
cd python3.11-*/
# The numbers of newer calls, which Python reads from the kernel's headers, and the functions of newer C libraries.
cat > old.h <<'HEADER'
#include <sys/syscall.h>
#undef __NR_pidfd_open
#undef SYS_pidfd_open
HEADER
./configure -q --without-ensurepip --prefix="$1/python" CFLAGS="-O1 -include $PWD/old.h" ac_cv_func_memfd_create=no ac_cv_func_eventfd=no \
    ac_cv_func_close_range=no ac_cv_func_copy_file_range=no ac_cv_func_preadv2=no ac_cv_func_pwritev2=no
nice make -s -j2 > build.log 2>&1
make -s install > install.log 2>&1
"$1/python/bin/python3" -c 'import os; assert not hasattr(os, "pidfd_open") and not hasattr(os, "memfd_create")'
