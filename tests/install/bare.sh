#!/usr/bin/env bash
# Installs a wheel in a bare Debian without a compiler, and trains the quickstart there: tests/install/bare.sh WHEEL
# It needs root, and `apt-get install debootstrap`. The Debian stays in .bare; the environment is made anew.
set -euo pipefail
wheel=$(realpath "$1")
cd "$(dirname "$0")/../.."
root=$PWD/.bare
if ! [ -e "$root/usr/bin/python3" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" > /dev/null
fi
rm -rf "$root/work"
mkdir -p "$root/work"
cp "$wheel" constraints.txt notebooks/demo.py notebooks/01_quickstart.ipynb "$root/work"

# Inside: the name server, certificates and package folders of this machine, and nothing else of it.
inside() {
    for path in /etc/resolv.conf /etc/ssl/certs /etc/pip.conf ${PIP_FIND_LINKS:-}; do
        [ -e "$path" ] || continue
        if [ -d "$path" ]; then mkdir -p "$root$path"; else touch "$root$path"; fi
        mount --bind "$path" "$root$path"
    done
    mount -t proc proc "$root/proc"
    chroot "$root" /bin/bash -euo pipefail -c "$2"
}
export root
export -f inside
# shellcheck disable=SC2016
unshare --mount bash -c 'inside "$@"' inside "" '
    cd /work
    if command -v cc c++ gcc g++ clang; then echo "a compiler is here"; exit 1; fi
    python3 -m venv environment
    SECONDS=0
    environment/bin/pip install -q -c constraints.txt "$(ls ring_notebook*.whl)[all,demo]" 2>&1 | grep -v WARNING || true
    echo "installed in $SECONDS s: $(du -sm environment | cut -f1) MB, of which ours: $(du -sm environment/lib/python3*/site-packages/ring_notebook | cut -f1) MB"
    SECONDS=0
    environment/bin/python demo.py
    echo "ok: from the wheel to a trained model in $SECONDS s"
'
