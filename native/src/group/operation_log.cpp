#include "ring/group/operation_log.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>
#include <utility>

#include "ring/base/errors.hpp"
#include "ring/base/text.hpp"
#include "ring/base/wait.hpp"
#include "ring/memory/memory_file.hpp"

namespace ring {
namespace {

// "train.py:12 in step", or "line 3 of the cell"
std::string line_of(const Site& site) {
    const std::string file = text_of(site.file), function = text_of(site.function), line = std::to_string(site.line);
    if (file.rfind("<cell of run ", 0) == 0) return "line " + line + " of the cell";
    const std::string where = file.substr(file.rfind('/') + 1) + ":" + line;
    return function == "<module>" ? where : where + " in " + function;
}

// Wraps around where a damaged log has numbers that are too large.
std::int64_t on_wall_clock(std::int64_t time, std::int64_t ahead) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(time) + static_cast<std::uint64_t>(ahead));
}

// The part of the header that the record has.
Header header_in(const LogRecord& record) {
    Header header;
    std::uint64_t words[kHeaderLine / 8];
    for (std::size_t i = 0; i < kHeaderLine / 8; ++i) words[i] = record.line[i].load(std::memory_order_relaxed);
    std::memcpy(static_cast<void*>(&header), words, sizeof words);
    header.dims = std::min<std::uint8_t>(header.dims, std::size(record.shape));
    for (int i = 0; i < header.dims; ++i)
        header.shape[i] = static_cast<std::int64_t>(header.dims == 1 ? header.count : record.shape[i].load());
    return header;
}

LoggedOperation logged(const LogRecord& record, std::int64_t ahead) {
    const Header header = header_in(record);
    const LogState state = record.state.load();
    const bool known = is_known(header.kind) && is_known(header.dtype) && is_known(header.op) && is_known(state);
    LoggedOperation one;
    char name[kNameBytes];
    for (std::size_t i = 0; i < kNameBytes / 8; ++i) {
        const std::uint64_t word = record.name[i].load();
        std::memcpy(name + i * sizeof word, &word, sizeof word);
    }
    one.name.assign(name, std::min<std::uint64_t>(record.named.load(), kNameBytes));
    one.kind = !known ? "unknown" : state == LogState::Note ? to_string(state) : to_string(header.kind);
    if (known && output_of(header.kind) != Output::Nothing) {
        if (reduces(header.kind)) one.what = std::string(to_string(header.op)) + " ";
        one.what += tensor_text(header);
        if (header.root >= 0) one.what += " root " + std::to_string(header.root);
        one.bytes = header.count * item_size(header.dtype);
    }
    one.group = record.group.load();
    one.size = record.size.load();
    one.generation = record.generation.load();
    one.sequence = header.sequence;
    const auto when = [&](std::int64_t time) { return time == 0 ? 0 : on_wall_clock(time, ahead); };
    one.called = when(record.called.load());
    one.arrived = when(record.arrived.load());
    one.ended = when(record.ended.load());
    if (known) one.state = state;
    return one;
}

}  // namespace

std::vector<LoggedOperation> OperationLog::parse(std::string_view log) {
    std::vector<LoggedOperation> all;
    if (log.size() < kBytes) return all;
    const std::unique_ptr<std::byte[]> copy(new std::byte[kBytes]);  // aligned for all that lies in it
    std::memcpy(copy.get(), log.data(), kBytes);
    const auto* const head = reinterpret_cast<const LogHead*>(copy.get());
    if (head->magic.load() != kLogMagic) return all;
    const auto* const sites = reinterpret_cast<const Site*>(copy.get() + kLogSites);
    const auto* const records = reinterpret_cast<const LogRecord*>(copy.get() + kLogSites + kSites * sizeof(Site));
    std::map<std::uint64_t, const Site*> lines;
    for (const Site* site = sites; site < sites + kSites; ++site) lines[site->number] = site;
    std::map<std::uint64_t, const LogRecord*> written;  // those that are being written have no number
    for (const LogRecord* record = records; record < records + kLogRecords; ++record)
        written[record->number.load()] = record;
    for (const auto& [number, record] : written) {
        if (number == 0) continue;
        all.push_back(logged(*record, head->ahead.load()));
        const auto line = lines.find(record->site.load());
        if (line != lines.end() && line->first != 0) all.back().line = line_of(*line->second);
    }
    return all;
}

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
        file_ = memory_file("rank-operations", kBytes);
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
    text.copy(header.name, kNameBytes - 1);
    begin(header, group, now, now, site, LogState::Note);
}

std::uint32_t OperationLog::add_site(std::string_view file, std::string_view function, std::uint64_t line) {
    const std::uint64_t index = head_->next_site.load(std::memory_order_relaxed);  // under the interpreter's lock
    Site& site = sites_[index % kSites];
    site.number = 0;
    std::atomic_thread_fence(std::memory_order_release);
    set_text(site.file, file.substr(file.size() - std::min(file.size(), sizeof site.file - 1)));
    set_text(site.function, function);
    site.line = line;
    std::atomic_thread_fence(std::memory_order_release);
    site.number = index + 1;
    head_->next_site.store(index + 1, std::memory_order_release);
    return static_cast<std::uint32_t>(index + 1);
}

}  // namespace ring
