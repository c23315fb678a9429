// Notices whose first part arrives and whose rest does not: their sender has died, say, after it announced a message.
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>

#include "faults.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

struct Interrupted {};

bool is_notice(int tag) { return tag % 8 == Fabric::kNotice; }

// A link that shows a notice at once and delivers it when it is told to. Tensors end only after that first part.
class Withholding : public Link {
   public:
    explicit Withholding(std::shared_ptr<Link> link) : link_(std::move(link)) {}
    void deliver() { delivers_ = true; }
    bool has_shown() const { return has_shown_; }
    // From now on what carries tensors ends only after a notice has been shown.
    void notices_first() { notices_first_ = true; }

    Transfer send(int to, int tag, const void* data, std::size_t bytes) override {
        return link_->send(to, tag, data, bytes);
    }
    Transfer receive(int from, int tag, void* data, std::size_t bytes) override {
        const Transfer transfer = link_->receive(from, tag, data, bytes);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_notice(tag)) {
            has_shown_ = true;
            notices_.insert(transfer);
        } else if (tag % 8 == Fabric::kData) {
            tensors_.insert(transfer);
        }
        return transfer;
    }
    bool done(Transfer& transfer) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (notices_.count(transfer) != 0 && !delivers_) return false;
        if (tensors_.count(transfer) != 0 && notices_first_ && !notice_is_there()) return false;
        return link_->done(transfer);
    }
    void cancel(Transfer& transfer, std::shared_ptr<const void> keep) noexcept override {
        link_->cancel(transfer, std::move(keep));
    }
    bool probe(int tag, int& source, std::size_t& bytes) override {
        if (is_notice(tag)) notice_tag_ = tag;
        return link_->probe(tag, source, bytes);
    }
    void drain() override { link_->drain(); }
    int tag_limit() const override { return link_->tag_limit(); }

   private:
    bool notice_is_there() {
        int source = 0;
        std::size_t bytes = 0;
        return has_shown_ || (notice_tag_ >= 0 && link_->probe(notice_tag_, source, bytes));
    }

    std::shared_ptr<Link> link_;
    std::mutex mutex_;
    std::set<Transfer> notices_, tensors_;
    std::atomic<int> notice_tag_{-1};
    std::atomic<bool> has_shown_{false}, delivers_{false}, notices_first_{false};
};

// A rank that waits for another host keeps its deadline and can be interrupted.
void the_rest_never_comes(bool queued, bool interrupted) {
    as_ranks("the rest of a notice never comes", 2, true, [&](Place place) {
        const auto link = std::make_shared<Withholding>(place.link);
        place.link = link;
        const auto ring = place.open();
        if (place.rank == 1) {
            ring->abort("rank 1 fails while the other host waits");
            return;
        }
        const auto elapsed = stopwatch();
        if (interrupted) {
            const auto interrupt = [&] {
                if (link->has_shown() && elapsed() > 0.2) throw Interrupted{};
            };
            expect(fails<Interrupted>([&] { carry_out(*ring, {}, queued, 0, interrupt); }),
                   "a rank was not interrupted beside a notice that does not end");
        } else {
            expect(fails<Timeout>([&] { carry_out(*ring, {}, queued, 0.3); }),
                   "a rank missed its deadline beside a notice that does not end");
            expect(link->has_shown(), "no notice was on its way");
        }
        expect(elapsed() < kTimeout / 2, "a rank waited for a notice that does not end");
    });
}

// What arrived after another host's abort may be anything, so an operation does not complete before it has read of it.
void an_abort_counts_before_what_came_after_it() {
    as_ranks("an abort counts first", 2, true, [&](Place place) {
        const auto link = std::make_shared<Withholding>(place.link);
        place.link = link;
        const auto ring = place.open();
        std::vector<float> tensor(100'000, 1.0f);
        Request request;
        request.kind = OpKind::Allgather;
        request.dtype = DType::Float32;
        request.shape = {static_cast<std::int64_t>(tensor.size())};
        request.pieces.push_back({reinterpret_cast<const std::byte*>(tensor.data()), nullptr, tensor.size()});
        if (place.rank == 1) {
            carry_out(*ring, request, false);
            ring->abort("rank 1 fails");
            return;
        }
        link->notices_first();
        const auto elapsed = stopwatch();
        const auto deliver = [&] {
            if (link->has_shown() && elapsed() > 0.2) link->deliver();
        };
        expect(fails<Aborted>([&] { carry_out(*ring, request, false, kTimeout, deliver); }),
               "an operation completed beside an abort that had been announced before");
    });
}

}  // namespace

void check_notices() {
    for (const bool queued : {false, true})
        for (const bool interrupted : {false, true}) the_rest_never_comes(queued, interrupted);
    an_abort_counts_before_what_came_after_it();
}

}  // namespace ring::test
