#include "ring/memory/memory_left.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace ring {
namespace {

// The files of a control group: in the unified hierarchy, and in that of the memory controller alone, which many
// clusters still have.
struct Files {
    const char *limit, *used, *inactive, *active;
};
constexpr Files kFiles[] = {
    {"/memory.max", "/memory.current", "inactive_file ", "active_file "},
    {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file ", "total_active_file "},
};

// The number after `key` at the beginning of a line of the file; SIZE_MAX where there is none ("max", or no file).
std::size_t read_number(const std::string& path, const char* key) {
    FILE* file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return SIZE_MAX;
    const std::size_t length = std::strlen(key);
    std::size_t value = SIZE_MAX;
    char line[256];
    while (value == SIZE_MAX && std::fgets(line, sizeof line, file) != nullptr)
        if (std::strncmp(line, key, length) != 0 || std::sscanf(line + length, "%zu", &value) != 1) value = SIZE_MAX;
    std::fclose(file);
    return value;
}

std::size_t left_of(const std::string& directory, const Files& files) {
    const std::size_t limit = read_number(directory + files.limit, "");
    std::size_t used = limit == SIZE_MAX ? SIZE_MAX : read_number(directory + files.used, "");
    if (used == SIZE_MAX) return SIZE_MAX;
    // Ring memory counts as anonymous memory, so it is not part of these.
    for (const char* cache : {files.inactive, files.active}) {
        const std::size_t bytes = read_number(directory + "/memory.stat", cache);
        if (bytes != SIZE_MAX) used -= std::min(used, bytes);
    }
    return limit > used ? limit - used : 0;
}

std::size_t left_of(const std::string& directory) {
    std::size_t left = SIZE_MAX;
    for (const Files& files : kFiles) left = std::min(left, left_of(directory, files));
    return left;
}

// This process's group in the hierarchy whose line in /proc/self/cgroup ("4:memory:/path", "0::/path") has these
// controllers. In a container it is usually "/", the container's own group.
std::string own_group(const char* controllers) {
    std::string group;
    FILE* file = std::fopen("/proc/self/cgroup", "re");
    if (file == nullptr) return group;
    char line[4096];
    while (group.empty() && std::fgets(line, sizeof line, file) != nullptr) {
        const char* at = std::strchr(line, ':');
        const std::size_t length = std::strlen(controllers);
        if (at != nullptr && std::strncmp(at, controllers, length) == 0)
            group.assign(at + length, std::strcspn(at + length, "\n"));
    }
    std::fclose(file);
    return group;
}

}  // namespace

std::size_t control_group_left(const std::string& root, std::string group) {
    std::size_t left = left_of(root);
    for (; group.size() > 1; group.resize(std::min(group.rfind('/'), group.size() - 1)))
        left = std::min(left, left_of(root + group));
    return left;
}

std::size_t memory_left() {
    const std::size_t free = read_number("/proc/meminfo", "MemAvailable:");
    return std::min({free == SIZE_MAX ? free : free * 1024, control_group_left("/sys/fs/cgroup", own_group("::")),
                     control_group_left("/sys/fs/cgroup/memory", own_group(":memory:"))});
}

}  // namespace ring
