# A small container: 64 KiB of /dev/shm, a root that nobody may write to, half a core, 32 processes and threads at most.
# `unshare --mount --pid --fork --ipc --uts sh container.sh GROUP FOLDER COMMAND...`, with control groups named GROUP that
# the caller has made, and one FOLDER to write to.
set -e
group=$1 folder=$2
shift 2
mount -t proc proc /proc
mount -t tmpfs -o size=64k tmpfs /dev/shm
mount --bind "$folder" /mnt
for place in / /tmp /var/tmp; do
    mount --bind "$place" "$place"
    mount -o remount,bind,ro "$place"
done
for tasks in /sys/fs/cgroup/cpu/"$group"/tasks /sys/fs/cgroup/pids/"$group"/tasks /sys/fs/cgroup/"$group"/cgroup.procs; do
    if [ -e "$tasks" ]; then echo 0 > "$tasks"; fi
done
cd /mnt
exec "$@"
