// Memory without a name, and its pages, with substitutes where a kernel or sandbox refuses the calls for them.
// `ring_notebook/machine/os_calls.py` has what Python substitutes.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace ring {

// Whether the kernel has the call and permits it, so that the error is a lack of descriptors or memory.
inline bool has_happened(int error) { return error == EMFILE || error == ENFILE || error == ENOMEM; }

// The descriptor of an empty file that no folder names: a memfd, or a file in a folder with `room` bytes free, unlinked
// at once. -1 where neither can be had; errno is memfd_create's then.
inline int memory_file(const char* name, unsigned long long room) {
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 || has_happened(errno)) return fd;
    const int refused = errno;
    char own[32] = "", path[64] = "";
    snprintf(own, sizeof own, "/run/user/%u", static_cast<unsigned>(geteuid()));
    const char* const folders[] = {"/dev/shm", own, "/tmp", "/var/tmp"};
    for (const char* folder : folders) {
        struct statfs about{};
        if (statfs(folder, &about) != 0 ||
            static_cast<unsigned long long>(about.f_bavail) * static_cast<unsigned long long>(about.f_bsize) < room)
            continue;
        const int found = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        if (found >= 0) return found;
        snprintf(path, sizeof path, "%s/ring-XXXXXX", folder);
        const int named = mkostemp(path, O_CLOEXEC);
        if (named < 0) continue;
        unlink(path);
        return named;
    }
    errno = refused;
    return -1;
}

// Gives pages to a part of a file, whose content does not matter, so that no later access can fail. Returns false, with
// errno, where there is no room. Writes zeros on a system that has no call for this.
inline bool reserve_room(int fd, off_t begin, off_t bytes) {
    while (fallocate(fd, 0, begin, bytes) != 0) {
        if (errno == EINTR) continue;
        if (errno == ENOSPC || errno == EFBIG || errno == ENOMEM || errno == EBADF || errno == EINVAL) return false;
        static const char kZeros[1 << 16] = {};
        for (off_t at = begin; at < begin + bytes;) {
            const off_t left = begin + bytes - at;
            const ssize_t written =
                pwrite(fd, kZeros, left < static_cast<off_t>(sizeof kZeros) ? left : sizeof kZeros, at);
            if (written < 0 && errno != EINTR) return false;
            at += written < 0 ? 0 : written;
        }
        return true;
    }
    return true;
}

}  // namespace ring
