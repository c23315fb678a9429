#include "faults.hpp"

#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>

#include "fake_mpi.hpp"
#include "ring/communicator/communicator.hpp"

namespace ring::test {
namespace {

constexpr std::size_t kArena = 64 << 20;
constexpr double kTimeout = 60.0;  // seconds

void expect(bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
}

template <class Failure>
bool fails(const std::function<void()>& call) {
    try {
        call();
    } catch (const Failure&) {
        return true;
    }
    return false;
}

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

// A link that fails ends the operation that needed it and the epoch, and whatever comes later ends too, although the
// other hosts cannot be told.
void a_link_is_cut(bool queued) {
    const auto first = Domain::create(0, 2, kArena);
    const std::shared_ptr<Domain> domains[] = {first, first->share(1)};
    const std::uint64_t offset = reserve_memory_link(*first);
    std::atomic<bool> right{true};
    std::thread ranks[2];
    for (int rank = 0; rank < 2; ++rank) {
        ranks[rank] = std::thread([&, rank] {
            const auto link = std::make_shared<Cut>(make_memory_link(domains[rank], offset));
            Communicator::Setup setup;
            setup.domain = domains[rank];
            setup.ranks = setup.host_of = setup.addresses = {0, 1};
            setup.local = {rank};
            setup.link = link;
            setup.index = rank;
            setup.epoch = 1;
            const auto ring = Communicator::open(std::move(setup), kTimeout, nullptr);
            if (rank == 1) return;
            link->cut();
            const auto barrier = [&] {
                const auto work = queued ? ring->start({}, kTimeout) : ring->run({}, kTimeout, nullptr);
                ring->wait(*work, 0, nullptr);
                work->get();
            };
            if (!fails<Error>(barrier) || !ring->aborted() || !fails<Aborted>(barrier)) right = false;
        });
    }
    for (std::thread& rank : ranks) rank.join();
    expect(right, "an operation over a link that was cut did not end as it must");
}

// A receive that MPI does not give back is waited for by nobody, and its memory stays until it has ended.
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

// A rank that comes too late for one epoch leaves the next one's block, at the same place, as it was.
void a_rank_comes_too_late() {
    const auto domain = Domain::create(0, 1, kArena);
    const std::uint64_t block = HostGroup::reserve(domain, {0}, {1, kPage, kPage, 0}, 8);
    expect(fails<Aborted>([&] { HostGroup(domain, block, {{0}, {0}, 0, 7, 0}); }),
           "an epoch let in who was of another");
    HostGroup(domain, block, {{0}, {0}, 0, 8, 0});
}

void memory_is_kept() {
    const auto domain = Domain::create(0, 1, kArena);
    bool quiet = false;
    {
        const Region region(domain, 5 * kPage);
        domain->keep(domain->offset_of(region.data(), 1) + kPage, [&](Domain&) { return quiet; });
    }
    for (quiet = false; domain->allocated() != 0; quiet = true) {
        domain->release(domain->allocate(1));
        expect((domain->allocated() == 0) == quiet, "a block that is kept is not free before its condition holds");
    }
}

}  // namespace

void check_faults() {
    a_link_is_cut(false);
    a_link_is_cut(true);
    a_receive_that_cannot_be_cancelled();
    a_rank_comes_too_late();
    memory_is_kept();
}

}  // namespace ring::test
