# A command in a bare system: `unshare --mount bash in_root.sh ROOT FOLDER PATHS... -- COMMAND...`. FOLDER becomes /mnt
# there; PATHS, which PYTHONPATH names, and our programs are where they are here.
set -euo pipefail
root=$1 folder=$2
shift 2
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$folder" "$root/mnt"
paths=("$(dirname "$0")")
while [ "$1" != -- ]; do
    if [ -n "$1" ]; then paths+=("$1"); fi
    shift
done
shift
for path in "${paths[@]}"; do
    mkdir -p "$root$path"
    mount --bind "$path" "$root$path"
done
chroot=$(command -v chroot)
export PATH=/work/environment/bin:/usr/bin:/bin HOME=/root
exec "$chroot" "$root" sh -c 'cd /mnt && exec "$@"' sh "$@"
