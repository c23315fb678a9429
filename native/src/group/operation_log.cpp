#include "ring/group/operation_log.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "ring/base/errors.hpp"
#include "ring/base/wait.hpp"

namespace ring {
namespace {

// The end of a text, or with `beginning` its beginning, cut to what fits with a zero behind it.
template <std::size_t Size>
void copy_text(char (&to)[Size], std::string_view text, bool beginning) {
    if (text.size() >= Size) text = beginning ? text.substr(0, Size - 1) : text.substr(text.size() - (Size - 1));
    std::memset(to, 0, Size);
    std::memcpy(to, text.data(), text.size());
}

}  // namespace

OperationLog::OperationLog(const std::string& path) {
    static std::atomic<std::uint64_t> made{0};
    id_ = ++made;
    const auto map = [&] {
        if (file_ < 0 || ftruncate(file_, static_cast<off_t>(kBytes)) != 0) return false;
        void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        if (mapped == MAP_FAILED) return false;
        base_ = static_cast<std::byte*>(mapped);
        head_ = reinterpret_cast<LogHead*>(base_);
        std::int64_t nobody = 0;
        // A program that the rank starts inherits its environment.
        if (head_->pid.compare_exchange_strong(nobody, getpid(), std::memory_order_relaxed)) return true;
        munmap(mapped, kBytes);
        return false;
    };
    file_ = path.empty() ? -1 : open(path.c_str(), O_RDWR | O_CLOEXEC);
    path_ = path;
    if (!map()) {
        if (file_ >= 0) close(file_);
        file_ = memfd_create("rank-operations", MFD_CLOEXEC);
        path_ = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_);
        if (!map()) {
            const int error = errno;
            if (file_ >= 0) close(file_);
            throw OutOfMemory(std::string("the log of operations: ") + std::strerror(error));
        }
    }
    sites_ = reinterpret_cast<Site*>(base_ + kLogSites);
    records_ = reinterpret_cast<LogRecord*>(base_ + kLogSites + kSites * sizeof(Site));
    const std::int64_t before = monotonic_ns(), wall = wall_clock_ns(), after = monotonic_ns();
    head_->ahead.store(wall - (before + after) / 2, std::memory_order_relaxed);
    head_->magic.store(kLogMagic, std::memory_order_release);
}

OperationLog::~OperationLog() {
    munmap(base_, kBytes);
    close(file_);
}

std::uint64_t OperationLog::put_name(LogRecord& record, std::string_view name) {
    std::uint64_t words[kNameBytes / 8] = {};
    const std::size_t bytes = std::min(name.size(), kNameBytes - 1);
    std::memcpy(words, name.data(), bytes);
    for (std::size_t i = 0; i <= bytes / 8; ++i) record.name[i].store(words[i], std::memory_order_relaxed);
    return bytes;
}

void OperationLog::put_shape(LogRecord& record, const Header& header) {
    for (int i = 0; i < std::min<int>(header.dims, 7); ++i)
        record.shape[i].store(static_cast<std::uint64_t>(header.shape[i]), std::memory_order_relaxed);
}

void OperationLog::arrive(std::uint64_t number, const Header& header, std::int64_t now) noexcept {
    LogRecord* record = find(number);
    if (record == nullptr) return;
    put_line(*record, header);
    record->arrived.store(now, std::memory_order_release);
}

void OperationLog::note(std::string_view text, const LogGroup& group, std::uint32_t site) {
    const std::int64_t now = monotonic_ns();
    Header header;
    header.kind = static_cast<OpKind>(kNote);
    text.copy(header.name, kNameBytes - 1);
    end(begin(header, group, now, now, site), now, true);
}

std::uint32_t OperationLog::add_site(std::string_view file, std::string_view function, std::uint64_t line) {
    const std::uint64_t index = head_->next_site.load(std::memory_order_relaxed);  // under the interpreter's lock
    Site& site = sites_[index % kSites];
    site.number = 0;
    std::atomic_thread_fence(std::memory_order_release);
    copy_text(site.file, file, false);
    copy_text(site.function, function, true);
    site.line = line;
    std::atomic_thread_fence(std::memory_order_release);
    site.number = index + 1;
    head_->next_site.store(index + 1, std::memory_order_release);
    return static_cast<std::uint32_t>(index + 1);
}

}  // namespace ring
