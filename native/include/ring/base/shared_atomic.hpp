// Words that several processes read and write.
#pragma once

#include <atomic>

namespace ring {

// An atomic in ring memory, lock-free because a lock would work in one process only.
template <class T>
struct SharedAtomic : std::atomic<T> {
    static_assert(std::atomic<T>::is_always_lock_free, "processes share it, so it needs atomic instructions");
    using std::atomic<T>::atomic;
    using std::atomic<T>::operator=;
};

}  // namespace ring
