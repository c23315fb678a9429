#!/usr/bin/env bash
# A bare system with its own Python and C library, in which pip has installed this package: `root.sh SUITE MIRROR FOLDER`.
# FOLDER/root is the system, and /work/environment in it what pip made. Some minutes, once; needs root and debootstrap.
# It takes a wheel of `make wheel` (with PYTHON of that system's version), if dist has one, and else compiles; a run that is
# ended compiles on from /work/objects in the next one.
set -euo pipefail
suite=$1 mirror=$2 folder=$3
source=$(realpath "$(dirname "$0")/../..")
root=$folder/root
mkdir -p "$folder"
[ -e "$root/work/installed" ] && exit
if ! [ -e "$folder/bootstrapped" ]; then
    rm -rf "$root"
    script=/usr/share/debootstrap/scripts/$suite
    [ -e "$script" ] || script=$(dirname "$script")/gutsy  # of all Ubuntus; an older debootstrap lacks the newest names
    debootstrap --variant=minbase --components=main,universe --include=python3,python3-venv,python3-dev,g++,ca-certificates,iproute2 \
        "$suite" "$root" "$mirror" "$script" > "$folder/bootstrap.log"
    touch "$folder/bootstrapped"
fi
mkdir -p "$root/work/source"
for part in native ring_notebook pyproject.toml constraints.txt README.md LICENSE; do cp -a "$source/$part" "$root/work/source/"; done
rm -f "$root"/work/source/ring_notebook/*.so
for path in /etc/resolv.conf /etc/pip.conf; do if [ -e "$path" ]; then cp -L "$path" "$root$path"; fi; done
if [ -d /etc/ssl/certs ]; then rm -rf "$root/etc/ssl/certs"; mkdir -p "$root/etc/ssl/certs"; cp -rL /etc/ssl/certs/. "$root/etc/ssl/certs/"; fi
rm -rf "$root/work/wheels"
mkdir -p "$root/work/wheels"
for wheel in "$source"/dist/*.whl; do if [ -e "$wheel" ]; then cp "$wheel" "$root/work/wheels/"; fi; done
cat > "$root/work/install" <<'INSIDE'
cd /work
[ -x environment/bin/pip ] || python3 -m venv environment
environment/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || exit 0 # too old: a test has pip say so
pip() { environment/bin/pip "$1" -q -c source/constraints.txt "${@:2}"; }
for wheel in wheels/*.whl; do pip install "$wheel" && exit; done  # it says so of one that is for another Python
pip install scikit-build-core pybind11 cmake ninja
PATH=/work/environment/bin:$PATH SKBUILD_BUILD_DIR=/work/objects pip install --no-build-isolation ./source
INSIDE
unshare --mount bash -euc '
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    for folder in ${PIP_FIND_LINKS:-}; do
        if [ -d "$folder" ]; then mkdir -p "$1$folder"; mount --bind "$folder" "$1$folder"; fi
    done
    chroot "$1" bash -eux "$2"
' "" "$root" /work/install > "$folder/install.log" 2>&1
touch "$root/work/installed"
