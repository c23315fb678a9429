// NVIDIA's management library (libnvidia-ml.so.1) without a GPU: what nvidia-ml-py calls of it, for two GPUs of 80 GiB.
//
// GPU k is busy for 30 - 10k percent of the time and has k + 1 GiB in use, so that a test can tell them apart.

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int success = 0, invalid_argument = 2, not_supported = 3, not_found = 6;
constexpr unsigned count = 2;
constexpr std::uint64_t gib = std::uint64_t{1} << 30, total = 80 * gib;

struct Gpu {
    unsigned index;
} gpus[count] = {{0}, {1}};

struct Memory {
    unsigned long long total, free, used;
};
struct Utilization {
    unsigned gpu, memory;
};

void write_uuid(const Gpu* gpu, char* text, unsigned length) {
    std::snprintf(text, length, "GPU-00000000-0000-0000-0000-00000000000%u", gpu->index);
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return success; }
int nvmlShutdown() { return success; }
const char* nvmlErrorString(int) { return "an error of the fake"; }

int nvmlDeviceGetCount_v2(unsigned* found) {
    *found = count;
    return success;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** gpu) {
    if (index >= count) return invalid_argument;
    *gpu = &gpus[index];
    return success;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, Gpu** gpu) {
    for (Gpu& one : gpus) {
        char own[96];
        write_uuid(&one, own, sizeof own);
        if (std::strcmp(uuid, own) == 0) {
            *gpu = &one;
            return success;
        }
    }
    return not_found;
}

int nvmlDeviceGetUUID(Gpu* gpu, char* text, unsigned length) {
    write_uuid(gpu, text, length);
    return success;
}

int nvmlDeviceGetMigMode(Gpu*, unsigned*, unsigned*) { return not_supported; }

int nvmlDeviceGetMemoryInfo(Gpu* gpu, Memory* memory) {
    const std::uint64_t used = (gpu->index + 1) * gib;
    *memory = {total, total - used, used};
    return success;
}

int nvmlDeviceGetUtilizationRates(Gpu* gpu, Utilization* rates) {
    *rates = {30 - 10 * gpu->index, 5};
    return success;
}
}
