# As in gVisor: /proc/sys/kernel has neither pid_max nor threads-max nor boot_id. `unshare --mount sh gvisor_proc.sh COMMAND...`
set -e
kernel=$(mktemp -d)
mount -t tmpfs tmpfs "$kernel"
for file in cap_last_cap hostname overflowgid overflowuid osrelease ostype version sem shmall shmmax shmmni; do
    cat "/proc/sys/kernel/$file" > "$kernel/$file"
done
mount --bind "$kernel" /proc/sys/kernel
exec "$@"
