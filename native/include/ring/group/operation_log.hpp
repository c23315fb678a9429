// The last operations of this rank, always kept, in memory that outlives it: its launcher holds the file.
//
//   | LogHead, to kLogSites | sites: lines of callers | records |
//
// `parse` reads it, also when the rank was killed. A record of one operation is written when it is called, and
// completed when it ends. That costs two cache lines, and no further read of the clock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ring/base/shared_atomic.hpp"
#include "ring/group/header.hpp"

namespace ring {

constexpr std::uint64_t kLogMagic = 0x52494e474c4f4735;  // "RINGLOG5"
constexpr std::size_t kLogSites = 4096;                  // where the sites begin
constexpr std::uint64_t kSites = 256;
constexpr std::uint64_t kLogRecords = 1024;

// Note: no operation; the name is a text of the rank about itself.
#define RING_LOG_STATES(X) X(Pending, "pending") X(Done, "done") X(Failed, "failed") X(Note, "note")
RING_ENUM(LogState, std::uint32_t, RING_LOG_STATES);

struct LogHead {
    SharedAtomic<std::uint64_t> magic{0};
    SharedAtomic<std::int64_t> pid{0};
    SharedAtomic<std::int64_t> ahead{0};  // ns by which the wall clock is ahead of the monotonic one
    SharedAtomic<std::uint64_t> next{0};  // number of the next record
    SharedAtomic<std::uint64_t> next_site{0};
};

// The line of a caller. Only the newest kSites are kept; `number` tells whether an entry is still the same line.
struct Site {
    std::uint64_t number = 0;  // 1 + its index among all
    std::uint64_t line = 0;
    char function[40] = {};
    char file[72] = {};  // the end of its path
};
static_assert(sizeof(Site) == 128, "two cache lines");

struct LogRecord {
    SharedAtomic<std::uint64_t> number{0};  // 1 + its index among all; 0 while it is written
    SharedAtomic<std::int64_t> called{0};   // ns, monotonic
    SharedAtomic<std::int64_t> arrived{0};  // when the others could see it, 0 before
    SharedAtomic<std::int64_t> ended{0};    // 0 before
    SharedAtomic<std::uint64_t> group{0};   // the same number on all its members
    SharedAtomic<std::uint32_t> site{0};    // of the caller; 0 where it is not known
    SharedAtomic<std::uint32_t> size{0};    // of the group
    SharedAtomic<LogState> state{LogState::Pending};
    SharedAtomic<std::uint32_t> generation{0};
    SharedAtomic<std::uint64_t> named{0};                    // bytes of `name` that are set
    SharedAtomic<std::uint64_t> line[kHeaderLine / 8] = {};  // the first line of its header
    SharedAtomic<std::uint64_t> shape[7] = {};               // of two dimensions and more
    SharedAtomic<std::uint64_t> name[kNameBytes / 8] = {};   // or the text of a note
};
static_assert(sizeof(LogRecord) == 256, "four cache lines");

// A record as a reader sees it; the fields are those of Operation in ring_notebook/analysis/operation_log.py.
struct LoggedOperation {
    std::string kind, name, what;
    std::uint64_t bytes = 0, group = 0;
    std::uint32_t size = 0, generation = 0;
    std::uint64_t sequence = 0;
    std::int64_t called = 0, arrived = 0, ended = 0;  // ns of the wall clock; 0 for what has not happened
    LogState state = LogState::Failed;
    std::string line;
};

// Which group and generation an operation belongs to.
struct LogGroup {
    std::uint64_t id = 0;
    std::uint32_t size = 0;
    std::uint32_t generation = 0;
};

class OperationLog {
   public:
    static constexpr std::size_t kBytes = kLogSites + kSites * sizeof(Site) + kLogRecords * sizeof(LogRecord);

    // Writes to the file, unless another process does. With an empty path, or if that file cannot be used, to memory of
    // its own, which ends with this process.
    explicit OperationLog(const std::string& path);
    ~OperationLog();
    OperationLog(const OperationLog&) = delete;
    OperationLog& operator=(const OperationLog&) = delete;

    // The operations in the bytes of a log, in the order of the calls; none if they are no log. Safe with any bytes.
    static std::vector<LoggedOperation> parse(std::string_view log);
    // A file that this user can open while its owner lives.
    const std::string& path() const { return path_; }
    // Unique among the logs of this process and of those that it was forked from.
    std::uint64_t id() const { return id_; }

    // Number of operations called so far.
    std::uint64_t calls() const { return head_->next.load(std::memory_order_relaxed); }
    // An operation is called; the number of its record. `arrived` is 0 where the others cannot see it yet.
    std::uint64_t begin(const Header& header, const LogGroup& group, std::int64_t called, std::int64_t arrived,
                        std::uint32_t site, LogState state = LogState::Pending) {
        const std::uint64_t index = head_->next.fetch_add(1, std::memory_order_relaxed);
        LogRecord& record = records_[index % kLogRecords];
        // A reader that finds the number has what was written before it.
        record.number.store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        record.called.store(called, std::memory_order_relaxed);
        record.arrived.store(arrived, std::memory_order_relaxed);
        record.ended.store(0, std::memory_order_relaxed);
        record.group.store(group.id, std::memory_order_relaxed);
        record.site.store(site, std::memory_order_relaxed);
        record.size.store(group.size, std::memory_order_relaxed);
        record.state.store(state, std::memory_order_relaxed);
        record.generation.store(group.generation, std::memory_order_relaxed);
        put_line(record, header);
        std::uint64_t named = 0;
        if (header.name[0] != '\0') named = put_name(record, header.name);
        if (header.dims > 1) put_shape(record, header);
        record.named.store(named, std::memory_order_relaxed);
        record.number.store(index + 1, std::memory_order_release);
        return index + 1;
    }
    // The others can see it from now on, under the sequence of the header.
    void arrive(std::uint64_t number, const Header& header, std::int64_t now) noexcept;
    void end(std::uint64_t number, std::int64_t now, bool done) noexcept {
        if (LogRecord* record = find(number)) {
            record->ended.store(now, std::memory_order_relaxed);
            record->state.store(done ? LogState::Done : LogState::Failed, std::memory_order_release);
        }
    }
    // Sets the caller's line of an operation that waits.
    void set_site(std::uint64_t number, std::uint32_t site) noexcept {
        if (LogRecord* record = find(number)) record->site.store(site, std::memory_order_relaxed);
    }
    // Adds a note of this rank: that it raised, or the members of a group.
    void note(std::string_view text, const LogGroup& group, std::uint32_t site);
    // The number of a line; one line takes one number for as long as its caller remembers it.
    std::uint32_t add_site(std::string_view file, std::string_view function, std::uint64_t line);
    // Whether the line is among those that are kept.
    bool knows_site(std::uint32_t number) const {
        return number != 0 && number + kSites > head_->next_site.load(std::memory_order_relaxed);
    }

   private:
    LogRecord* find(std::uint64_t number) noexcept {
        if (number == 0) return nullptr;
        LogRecord& record = records_[(number - 1) % kLogRecords];
        return record.number.load(std::memory_order_relaxed) == number ? &record : nullptr;
    }
    static void put_line(LogRecord& record, const Header& header) {
        std::uint64_t words[kHeaderLine / 8];
        std::memcpy(words, &header, sizeof words);
        for (std::size_t i = 0; i < kHeaderLine / 8; ++i) record.line[i].store(words[i], std::memory_order_relaxed);
    }
    static std::uint64_t put_name(LogRecord& record, std::string_view name);
    static void put_shape(LogRecord& record, const Header& header);

    std::uint64_t id_;
    std::string path_;
    int file_ = -1;
    std::byte* base_ = nullptr;
    LogHead* head_ = nullptr;
    Site* sites_ = nullptr;
    LogRecord* records_ = nullptr;
};

}  // namespace ring
