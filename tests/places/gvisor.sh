# A real gVisor: `sh gvisor.sh FOLDER COMMAND...`, with FOLDER to write to, without a network and control groups.
folder=$1
shift
exec runsc --ignore-cgroups --network=none do -force-overlay=false -quiet -cwd "$folder" env PATH="$PATH" PYTHONPATH="$PYTHONPATH" \
    RING_FRAMEWORK="$RING_FRAMEWORK" HOME="$HOME" "$@"
