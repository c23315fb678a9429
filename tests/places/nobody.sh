# A user without an entry in /etc/passwd, without HOME, a terminal, a network or /dev/shm, who may write to one folder:
# `unshare --mount --net sh nobody.sh PYTHON_HOME FOLDER COMMAND...`. PYTHON_HOME and PYTHONPATH are made visible where
# they are root's alone: a folder above that others may not enter is replaced by one that has nothing else.
set -e
home=$1 folder=$2
shift 2
ip link set lo up
devices=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$devices"
for device in null zero full random urandom; do
    touch "$devices/$device"
    mount --bind "/dev/$device" "$devices/$device"
done
ln -s /proc/self/fd "$devices/fd"
mount --rbind "$devices" /dev
chown -R 54321:54321 "$folder"
mount --bind "$folder" /mnt  # the folders above it may be root's alone
for needed in $home $(echo "$PYTHONPATH" | tr : ' '); do
    path=
    for word in $(readlink -f "$needed" | tr / ' '); do
        path=$path/$word
        case $(stat -c %A "$path") in *[xt]) continue ;; esac
        instead=$(mktemp -d)
        mount -t tmpfs -o mode=755 tmpfs "$instead"
        mkdir -p "$instead/${needed#"$path"}"
        mount --bind "$needed" "$instead/${needed#"$path"}"
        if [ "$needed" != "$home" ]; then chmod -R a+rX "$needed"; fi
        mount --rbind "$instead" "$path"
        break
    done
done
cd /mnt
exec setsid -w setpriv --reuid 54321 --regid 54321 --clear-groups env -u HOME -u USER -u LOGNAME "$@" < /dev/null
