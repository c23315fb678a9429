// Data between hosts arrives damaged, too short or too long: headers, notices, messages and their answers.
#include <cstring>
#include <deque>
#include <mutex>

#include "fuzz/fuzz.hpp"
#include "ring/base/errors.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

constexpr double kPatience = 0.3;  // seconds; a message that was damaged may never be answered
constexpr int kHosts = 3;

// A link that damages some of the messages that it sends on one channel.
class Damaging : public Link {
   public:
    Damaging(std::shared_ptr<Link> link, int channel, Dice::result_type seed)
        : link_(std::move(link)), channel_(channel), dice_(seed) {}

    // Begins to damage messages.
    void begin() {
        const std::lock_guard<std::mutex> lock(mutex_);
        damages_ = true;
    }
    Transfer send(int to, int tag, const void* data, std::size_t bytes) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!damages_ || tag % 8 != channel_ || dice_() % 4 != 0) return link_->send(to, tag, data, bytes);
        const auto* from = static_cast<const std::byte*>(data);
        std::vector<std::byte>& copy = copies_.emplace_back(from, from + bytes);
        // Damage the first part of a message, which describes the rest; a tensor may have any bytes.
        for (Dice::result_type times = 1 + dice_() % 3; times > 0; --times)
            damage_one(dice_, copy.data(), std::min<std::size_t>(copy.size(), 600));
        if (dice_() % 4 == 0) copy.resize(1 + dice_() % (bytes + bytes / 8));
        return link_->send(to, tag, copy.data(), copy.size());
    }
    Transfer receive(int from, int tag, void* data, std::size_t bytes) override {
        return link_->receive(from, tag, data, bytes);
    }
    bool done(Transfer& transfer) override { return link_->done(transfer); }
    void cancel(Transfer& transfer, std::shared_ptr<const void> keep) noexcept override {
        link_->cancel(transfer, std::move(keep));
    }
    bool probe(int tag, int& source, std::size_t& bytes) override { return link_->probe(tag, source, bytes); }
    void drain() override { link_->drain(); }
    int tag_limit() const override { return link_->tag_limit(); }

   private:
    std::shared_ptr<Link> link_;
    int channel_;
    Dice dice_;
    std::mutex mutex_;
    bool damages_ = false;
    std::deque<std::vector<std::byte>> copies_;  // the link reads them later
};

Request one_tensor(OpKind kind, std::vector<float>& in, std::vector<float>& out, int size) {
    Request request;
    request.kind = kind;
    request.dtype = DType::Float32;
    request.root = kind == OpKind::Broadcast ? size - 1 : -1;
    request.shape = {static_cast<std::int64_t>(in.size())};
    if (kind == OpKind::Alltoall)
        request.splits.assign(static_cast<std::size_t>(size), static_cast<std::int64_t>(in.size()) / size);
    request.pieces.push_back(
        {reinterpret_cast<const std::byte*>(in.data()), reinterpret_cast<std::byte*>(out.data()), in.size()});
    return request;
}

// Operations and messages around the ring of hosts, the same on all ranks. `kept` owns their memory and outlives the
// communicator, because a message that has timed out may still move.
void talk(Communicator& ring, int rank, Dice dice, std::deque<std::vector<float>>& kept) {
    constexpr OpKind kinds[] = {OpKind::Allreduce, OpKind::ReduceScatter, OpKind::Allgather,
                                OpKind::Broadcast, OpKind::Alltoall,      OpKind::Barrier};
    constexpr std::size_t counts[] = {3, 999, 60'000};
    for (int i = 0; i < 6; ++i) {
        const OpKind kind = kinds[dice() % std::size(kinds)];
        std::vector<float>& in = kept.emplace_back(counts[dice() % std::size(counts)], 1.0f);
        std::vector<float>& out = kept.emplace_back(in.size());
        const bool is_message = dice() % 2 == 0, by_name = dice() % 3 == 0;
        if (is_message) {
            const auto send = ring.send((rank + 1) % kHosts, i, in.data(), in.size(), DType::Float32, kPatience, true);
            const auto receive =
                ring.receive((rank + kHosts - 1) % kHosts, i, out.data(), out.size(), DType::Float32, kPatience, true);
            ring.wait(*receive, kPatience, nullptr);
            ring.wait(*send, kPatience, nullptr);
            continue;
        }
        Request request = kind == OpKind::Barrier ? Request{} : one_tensor(kind, in, out, kHosts);
        if (by_name) request.name = "operation " + std::to_string(i);
        const auto work =
            by_name ? ring.start(std::move(request), kPatience) : ring.run(std::move(request), kPatience, {});
        try {
            ring.wait(*work, kPatience, nullptr);
        } catch (...) {
            ring.abort("it takes too long");
            ring.wait(*work, 0, nullptr);  // the tensors are this rank's again
            throw;
        }
        work->get();
    }
}

}  // namespace

void fuzz_link(Dice& dice, double seconds) {
    const auto elapsed = stopwatch();
    std::uint64_t generation = 0;
    do {
        constexpr int channels[] = {Fabric::kAgreement, Fabric::kNotice, Fabric::kMessage};
        const int channel = channels[dice() % std::size(channels)];
        const bool is_damaged = dice() % 8 != 0;
        const bool aborts = channel == Fabric::kNotice || dice() % 8 == 0;
        const auto plan = dice(), seed = dice();
        ++generation;
        as_ranks("a link that damages messages", kHosts, true, [&](Place place) {
            const auto link = std::make_shared<Damaging>(place.link, channel, seed + static_cast<unsigned>(place.rank));
            place.link = link;
            std::deque<std::vector<float>> kept;
            const auto ring = place.open();
            if (is_damaged) link->begin();
            try {
                talk(*ring, place.rank, Dice(plan), kept);
                if (aborts && place.rank == 0) ring->abort(std::string(dice() % 5000, 'r'));
                if (aborts) carry_out(*ring, {}, false, kPatience);
                ring->close(nullptr);
            } catch (const Error& error) {
                expect(is_damaged || aborts, std::string("failed without damage: ") + error.what());
            }
        });
    } while (elapsed() < seconds);
}

}  // namespace ring::test
