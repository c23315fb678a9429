// Notices of which only the first part arrives: for example, their sender has died after it announced a message.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "faults/faults.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

struct Interrupted {};

bool is_notice(int tag) { return tag % 8 == Fabric::kNotice; }

// A link that announces a notice at once and delivers it on request. Transfers of tensors end only after the first
// part.
class Withholding : public Link {
   public:
    explicit Withholding(std::shared_ptr<Link> link) : link_(std::move(link)) {}
    void deliver() { delivers_ = true; }
    bool has_shown() const { return has_shown_; }
    // From now on transfers of tensors end only after a notice was announced.
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

// Data that arrived after another host's abort may be wrong, so an operation reads the notice before it completes.
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

// Hosts whose messages have different sizes find that in their first exchange, which is small.
void settings_differ_between_hosts() {
    as_ranks("settings differ between hosts", 2, true, [](Place place) {
        place.options.inline_bytes = place.rank == 0 ? 16 << 10 : 512 << 10;
        std::string said;
        try {
            place.open();
        } catch (const InvalidArgument& error) {
            said = error.what();
        } catch (const Aborted& error) {  // the other host was sooner
            said = error.what();
        }
        expect(said.find("RING_INLINE allows") != std::string::npos,
               "hosts with different settings opened a generation, or failed with: " + said);
    });
}

// A forked process destroys its copies although another thread of its parent has their locks.
void forked_while_a_notice_is_sent() {
    class Stuck : public Link {
       public:
        std::atomic<bool> sends{false}, ends{false};
        Transfer send(int, int, const void*, std::size_t) override {
            sends = true;
            while (!ends) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            return 0;
        }
        Transfer receive(int, int, void*, std::size_t) override { return 0; }
        bool done(Transfer&) override { return true; }
        void cancel(Transfer&, std::shared_ptr<const void>) noexcept override {}
        bool probe(int, int&, std::size_t&) override { return false; }
        void drain() override {}
        int tag_limit() const override { return 32767; }
    };
    const auto link = std::make_shared<Stuck>();
    auto fabric = std::make_unique<Fabric>(link, std::vector<int>{0, 1}, std::vector<int>{0, 1}, 0,
                                           Fabric::generation_identity(*link, 1, 2), Options{});
    std::thread other([&] { fabric->notices().announce_abort("for a test"); });
    wait_for([&] { return link->sends.load(); }, "a notice is sent");
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);  // ends a child that hangs
        fabric.reset();
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    link->ends = true;
    other.join();
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked process hangs in a lock of its parent's thread");
}

}  // namespace

void check_notices() {
    settings_differ_between_hosts();
    forked_while_a_notice_is_sent();
    for (const bool queued : {false, true})
        for (const bool interrupted : {false, true}) the_rest_never_comes(queued, interrupted);
    an_abort_counts_before_what_came_after_it();
}

}  // namespace ring::test
