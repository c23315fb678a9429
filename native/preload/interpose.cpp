// The functions of the C library that this library replaces, and the table that the core finds.
//
// Until the core activates it, it passes every call to the next library, so it has no effect in other
// programs that a rank runs.
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "blocks.hpp"
#include "promotion.hpp"

#define RING_EXPORT extern "C" __attribute__((visibility("default")))

namespace ring::preload {
namespace {

// The next library's function of that name. Memory freed during the lookup is lost.
template <class Function>
class Next {
   public:
    explicit constexpr Next(const char* name) : name_(name) {}
    Function* get() {
        Function* found = __atomic_load_n(&function_, __ATOMIC_RELAXED);
        if (found == nullptr) {
            found = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name_));
            __atomic_store_n(&function_, found, __ATOMIC_RELAXED);
        }
        return found;
    }

   private:
    const char* name_;
    Function* function_ = nullptr;
};

Next<int(void**, std::size_t, std::size_t)> next_posix_memalign("posix_memalign");
Next<void*(std::size_t, std::size_t)> next_aligned_alloc("aligned_alloc");
Next<void*(std::size_t, std::size_t)> next_memalign("memalign");
Next<void(void*)> next_free("free");
Next<void*(void*, std::size_t)> next_realloc("realloc");
Next<std::size_t(void*)> next_usable_size("malloc_usable_size");
Next<pid_t()> next_fork("fork");

bool is_alignment(std::size_t alignment) {
    return alignment != 0 && alignment <= kGranule && (alignment & (alignment - 1)) == 0;
}

// Null where the C library must serve the call.
void* take_aligned(std::size_t alignment, std::size_t bytes) {
    if (span() == 0 || bytes < kLeastBlock || !is_alignment(alignment)) return nullptr;
    const int before = errno;
    void* block = take(bytes);
    errno = before;
    return block;
}

void* move_block(void* address, std::size_t bytes) {
    pthread_mutex_lock(&lock);
    Block& block = expect_block(address);
    const std::size_t held = size_of(block);
    const bool fits = bytes <= held && bytes >= held / 2;
    if (fits) block.requested = bytes;
    pthread_mutex_unlock(&lock);
    if (fits) return address;
    void* moved = take(bytes);
    if (moved == nullptr) moved = malloc(bytes);
    if (moved == nullptr) return nullptr;
    memcpy(moved, address, bytes < held ? bytes : held);
    give(address);
    return moved;
}

void trim() {
    pthread_mutex_lock(&lock);
    drop_all_free();
    pthread_mutex_unlock(&lock);
}

PreloadCounts counts() {
    pthread_mutex_lock(&lock);
    std::size_t reserved = 0;
    for_all([&](Block& block) { reserved += size_of(block); });
    const PreloadCounts result{used_bytes(), cached_bytes(), promoted_bytes(), reserved};
    pthread_mutex_unlock(&lock);
    return result;
}

}  // namespace
}  // namespace ring::preload

namespace preload = ring::preload;

RING_EXPORT const ring::PreloadTable ring_preload_v1;
const ring::PreloadTable ring_preload_v1 = {preload::activate,  preload::attach, preload::detach,
                                            preload::offset_of, preload::claim,  preload::promote,
                                            preload::retire,    preload::trim,   preload::counts};

RING_EXPORT int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    void* block = alignment % sizeof(void*) == 0 ? preload::take_aligned(alignment, bytes) : nullptr;
    if (block == nullptr) return preload::next_posix_memalign.get()(memory, alignment, bytes);
    *memory = block;
    return 0;
}

RING_EXPORT void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
    void* block = preload::take_aligned(alignment, bytes);
    return block != nullptr ? block : preload::next_aligned_alloc.get()(alignment, bytes);
}

RING_EXPORT void* memalign(std::size_t alignment, std::size_t bytes) {
    void* block = preload::take_aligned(alignment, bytes);
    return block != nullptr ? block : preload::next_memalign.get()(alignment, bytes);
}

RING_EXPORT void free(void* memory) {
    if (!preload::is_ours(memory)) {
        auto* next = preload::next_free.get();
        if (next != nullptr) next(memory);
        return;
    }
    const int before = errno;
    preload::give(memory);
    errno = before;
}

RING_EXPORT void* realloc(void* memory, std::size_t bytes) {
    if (!preload::is_ours(memory)) return preload::next_realloc.get()(memory, bytes);
    if (bytes != 0) return preload::move_block(memory, bytes);
    free(memory);
    return nullptr;
}

RING_EXPORT std::size_t malloc_usable_size(void* memory) {
    if (!preload::is_ours(memory)) return preload::next_usable_size.get()(memory);
    pthread_mutex_lock(&preload::lock);
    const std::size_t bytes = preload::size_of(preload::expect_block(memory));
    pthread_mutex_unlock(&preload::lock);
    return bytes;
}

// Where memory is short for the snapshot, fork fails, instead of a child that the system kills later.
RING_EXPORT pid_t fork() {
    if (preload::can_fork()) return preload::next_fork.get()();
    errno = ENOMEM;
    return -1;
}
