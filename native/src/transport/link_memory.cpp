// A link through ring memory: one stream of messages for each ordered pair of ranks, read and written in pieces that
// stay in the cache.
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "ring/transport/link.hpp"

namespace ring {
namespace {

constexpr std::size_t kStreamBytes = 256 << 10;

// Bytes written and read so far; the difference lies in `data`, a circular buffer.
struct MemoryStream {
    alignas(64) SharedAtomic<std::uint64_t> written{0};
    alignas(64) SharedAtomic<std::uint64_t> read{0};
    alignas(64) std::byte data[kStreamBytes];
};

struct MessageHead {
    std::int64_t tag;
    std::uint64_t bytes;
};

class MemoryLink : public Link {
   public:
    MemoryLink(std::shared_ptr<RingMemory> ring_memory, std::uint64_t offset)
        : ring_memory_(std::move(ring_memory)),
          offset_(offset),
          outgoing_(static_cast<std::size_t>(ring_memory_->local_size())),
          incoming_(static_cast<std::size_t>(ring_memory_->local_size())) {}

    Transfer send(int to, int tag, const void* data, std::size_t bytes) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return begin([&](Transfer transfer) {
            outgoing_[static_cast<std::size_t>(to)].push_back(
                {transfer, {tag, bytes}, 0, static_cast<const std::byte*>(data), 0});
        });
    }

    Transfer receive(int from, int tag, void* data, std::size_t bytes) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return begin(
            [&](Transfer transfer) { wanted_.push_back({transfer, from, tag, static_cast<std::byte*>(data), bytes}); });
    }

    bool done(Transfer& transfer) override {
        if (transfer == 0) return true;
        const std::lock_guard<std::mutex> lock(mutex_);
        progress();
        const auto found = live_.find(transfer);
        if (!found->second) return false;
        live_.erase(found);
        transfer = 0;
        return true;
    }

    // Complete messages are copied when they are matched, so that no receive is ever half done.
    void cancel(Transfer& transfer, std::shared_ptr<const void>) noexcept override {
        if (transfer == 0) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        wanted_.erase(std::remove_if(wanted_.begin(), wanted_.end(),
                                     [&](const Wanted& wanted) { return wanted.transfer == transfer; }),
                      wanted_.end());
        // A message whose head was sent must be completed, or the reader loses its position in the stream: send zeros.
        for (auto& queue : outgoing_)
            for (auto out = queue.begin(); out != queue.end(); ++out)
                if (out->transfer == transfer) {
                    if (out->head_sent == 0) {
                        queue.erase(out);
                        break;
                    }
                    out->data = nullptr;
                }
        live_.erase(transfer);
        transfer = 0;
    }

    bool probe(int tag, int& source, std::size_t& bytes) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        progress();
        for (std::size_t from = 0; from < incoming_.size(); ++from)
            for (const Message& message : incoming_[from].complete)
                if (message.head.tag == tag) {
                    source = static_cast<int>(from);
                    bytes = message.body.size();
                    return true;
                }
        return false;
    }

    void drain() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        progress();
        for (Incoming& in : incoming_) in.complete.clear();
    }

    int tag_limit() const override { return 0x7fffffff; }

   private:
    struct Outgoing {
        Transfer transfer;
        MessageHead head;
        std::size_t head_sent;
        const std::byte* data;
        std::size_t sent;
    };
    struct Wanted {
        Transfer transfer;
        int from;
        int tag;
        std::byte* data;
        std::size_t bytes;
    };
    struct Message {
        MessageHead head;
        std::vector<std::byte> body;
    };
    // A message is received completely before it is matched: its receive may begin later.
    struct Incoming {
        MessageHead head{};
        std::size_t head_read = 0;
        std::size_t body_read = 0;
        std::vector<std::byte> partial;
        std::deque<Message> complete;
    };

    // Notes a transfer and queues it, or throws and does neither. Where memory is short for incoming messages, the
    // waiting receiver gets the error.
    template <class Queue>
    Transfer begin(Queue&& queue) {
        const auto noted = live_.emplace(++last_, false).first;
        const Transfer transfer = last_;
        try {
            queue(transfer);
        } catch (...) {
            live_.erase(noted);
            throw;
        }
        try {
            progress();
        } catch (const std::bad_alloc&) {
        }
        return transfer;
    }

    MemoryStream& stream(int from, int to) const {
        const auto n = static_cast<std::size_t>(ring_memory_->local_size());
        const std::size_t index = static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to);
        return *ring_memory_->at<MemoryStream>(offset_ + index * sizeof(MemoryStream));
    }

    static std::size_t push(MemoryStream& stream, const std::byte* data, std::size_t bytes) {
        const std::uint64_t written = stream.written.load(std::memory_order_relaxed);
        const std::size_t room = kStreamBytes - (written - stream.read.load(std::memory_order_acquire));
        const std::size_t n = std::min(room, bytes);
        if (n == 0) return 0;  // a store would take the cache line from the reader at every poll
        for (std::size_t done = 0; done < n;) {
            const std::size_t at = (written + done) % kStreamBytes;
            const std::size_t part = std::min(n - done, kStreamBytes - at);
            if (data != nullptr) {
                std::memcpy(stream.data + at, data + done, part);
            } else {
                std::memset(stream.data + at, 0, part);
            }
            done += part;
        }
        stream.written.store(written + n, std::memory_order_release);
        return n;
    }

    static std::size_t pop(MemoryStream& stream, std::byte* data, std::size_t bytes) {
        const std::uint64_t read = stream.read.load(std::memory_order_relaxed);
        const std::size_t there = stream.written.load(std::memory_order_acquire) - read;
        const std::size_t n = std::min(there, bytes);
        if (n == 0) return 0;
        for (std::size_t done = 0; done < n;) {
            const std::size_t at = (read + done) % kStreamBytes;
            const std::size_t part = std::min(n - done, kStreamBytes - at);
            std::memcpy(data + done, stream.data + at, part);
            done += part;
        }
        stream.read.store(read + n, std::memory_order_release);
        return n;
    }

    void progress() {
        const int own = ring_memory_->local_rank();
        for (int peer = 0; peer < ring_memory_->local_size(); ++peer) {
            push_to(stream(own, peer), outgoing_[static_cast<std::size_t>(peer)]);
            pull_from(stream(peer, own), incoming_[static_cast<std::size_t>(peer)]);
        }
        match();
    }

    void push_to(MemoryStream& stream, std::deque<Outgoing>& queue) {
        while (!queue.empty()) {
            Outgoing& out = queue.front();
            if (out.head_sent < sizeof(MessageHead)) {
                out.head_sent += push(stream, reinterpret_cast<const std::byte*>(&out.head) + out.head_sent,
                                      sizeof(MessageHead) - out.head_sent);
                if (out.head_sent < sizeof(MessageHead)) return;
            }
            const std::byte* rest = out.data == nullptr ? nullptr : out.data + out.sent;
            out.sent += push(stream, rest, out.head.bytes - out.sent);
            if (out.sent < out.head.bytes) return;
            mark_done(out.transfer);
            queue.pop_front();
        }
    }

    static void pull_from(MemoryStream& stream, Incoming& in) {
        for (;;) {
            if (in.head_read < sizeof(MessageHead)) {
                in.head_read += pop(stream, reinterpret_cast<std::byte*>(&in.head) + in.head_read,
                                    sizeof(MessageHead) - in.head_read);
                if (in.head_read < sizeof(MessageHead)) return;
                in.body_read = 0;
            }
            in.partial.resize(in.head.bytes);  // may throw; the next call tries again
            in.body_read += pop(stream, in.partial.data() + in.body_read, in.head.bytes - in.body_read);
            if (in.body_read < in.head.bytes) return;
            in.complete.emplace_back();
            in.complete.back() = {in.head, std::move(in.partial)};
            in.partial.clear();
            in.head_read = 0;
        }
    }

    void match() {
        for (auto wanted = wanted_.begin(); wanted != wanted_.end();) {
            auto& complete = incoming_[static_cast<std::size_t>(wanted->from)].complete;
            const auto found = std::find_if(complete.begin(), complete.end(),
                                            [&](const Message& message) { return message.head.tag == wanted->tag; });
            if (found == complete.end()) {
                ++wanted;
                continue;
            }
            std::memcpy(wanted->data, found->body.data(), std::min(found->body.size(), wanted->bytes));
            complete.erase(found);
            mark_done(wanted->transfer);
            wanted = wanted_.erase(wanted);
        }
    }

    void mark_done(Transfer transfer) {
        const auto found = live_.find(transfer);
        if (found != live_.end()) found->second = true;
    }

    std::shared_ptr<RingMemory> ring_memory_;
    std::uint64_t offset_;
    std::mutex mutex_;
    std::vector<std::deque<Outgoing>> outgoing_;
    std::vector<Incoming> incoming_;
    std::deque<Wanted> wanted_;
    std::map<Transfer, bool> live_;  // whether it is done
    Transfer last_ = 0;
};

}  // namespace

std::uint64_t reserve_memory_link(RingMemory& ring_memory) {
    const auto n = static_cast<std::size_t>(ring_memory.local_size());
    const std::uint64_t offset = ring_memory.allocate(n * n * sizeof(MemoryStream));
    for (std::size_t i = 0; i < n * n; ++i) new (ring_memory.at(offset + i * sizeof(MemoryStream))) MemoryStream();
    return offset;
}

std::shared_ptr<Link> make_memory_link(std::shared_ptr<RingMemory> ring_memory, std::uint64_t offset) {
    return std::make_shared<MemoryLink>(std::move(ring_memory), offset);
}

}  // namespace ring
