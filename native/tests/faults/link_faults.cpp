// Links that fail, and transfers that cannot be cancelled.
#include <atomic>
#include <vector>

#include "fakes/fake_mpi.hpp"
#include "faults/faults.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

// A link that works until it is cut.
class Cut : public Link {
   public:
    explicit Cut(std::shared_ptr<Link> link) : link_(std::move(link)) {}
    void cut() { cut_ = true; }
    Transfer send(int to, int tag, const void* data, std::size_t bytes) override {
        check();
        return link_->send(to, tag, data, bytes);
    }
    Transfer receive(int from, int tag, void* data, std::size_t bytes) override {
        check();
        return link_->receive(from, tag, data, bytes);
    }
    bool done(Transfer& transfer) override {
        if (transfer != 0) check();
        return link_->done(transfer);
    }
    void cancel(Transfer& transfer, std::shared_ptr<const void> keep) noexcept override {
        link_->cancel(transfer, std::move(keep));
    }
    bool probe(int tag, int& source, std::size_t& bytes) override {
        check();
        return link_->probe(tag, source, bytes);
    }
    void drain() override { link_->drain(); }
    int tag_limit() const override { return link_->tag_limit(); }

   private:
    void check() const {
        if (cut_) throw Error("the link is cut");
    }
    std::shared_ptr<Link> link_;
    std::atomic<bool> cut_{false};
};

// A failed link ends the operation that needs it, the generation, and all later operations, although no notice can
// reach the other hosts.
void a_link_is_cut(bool queued) {
    as_ranks("a link is cut", 2, true, [&](Place place) {
        const auto link = std::make_shared<Cut>(place.link);
        place.link = link;
        const auto ring = place.open();
        if (place.rank == 1) return;
        link->cut();
        const auto barrier = [&] { carry_out(*ring, {}, queued); };
        expect(fails<Error>(barrier) && ring->aborted() && fails<Aborted>(barrier),
               "an operation over a link that was cut did not end as it must");
    });
}

// No call waits for a receive that MPI cannot cancel, and its memory is kept until it has ended.
void a_receive_that_cannot_be_cancelled() {
    const auto link = make_mpi_link({nullptr, 0, 0, sizeof(int), -2, -1, 32767});
    for (const bool matched : {false, true}) {
        auto memory = std::make_shared<std::vector<char>>(1000);
        const std::weak_ptr<std::vector<char>> kept = memory;
        Link::Transfer transfer = link->receive(0, 1, memory->data(), memory->size());
        if (matched) fake_mpi::match();
        link->cancel(transfer, std::move(memory));
        expect(transfer == 0, "a transfer that was cancelled is none any more");
        expect(kept.expired() == !matched, "memory must stay while MPI may write to it, and no longer");
        fake_mpi::deliver();
        link->drain();
        expect(kept.expired(), "memory must go when MPI has written to it");
    }
}

}  // namespace

void check_links() {
    a_link_is_cut(false);
    a_link_is_cut(true);
    a_receive_that_cannot_be_cancelled();
}

}  // namespace ring::test
