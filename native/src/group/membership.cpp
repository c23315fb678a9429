#include "ring/group/membership.hpp"

#include <algorithm>
#include <string>

#include "ring/base/errors.hpp"
#include "ring/base/text.hpp"

namespace ring {
namespace {

class Candidate {
   public:
    Candidate(RingMemory& ring_memory, const GenerationCall& call)
        : ring_memory_(ring_memory), call_(call), own_(ring_memory.slot(me())), last_(call.last) {
        // A leader counted on this rank in an earlier call that was interrupted; the others may wait for it there.
        const std::uint64_t missed = own_.invited.load(std::memory_order_seq_cst);
        if (missed > last_) {
            last_ = missed;
            own_.given_up.store(std::max(own_.given_up.load(), missed), std::memory_order_seq_cst);
        }
        own_.wants.store(last_ + 1, std::memory_order_seq_cst);
        ring_bells();
    }
    // The leader must not count on this rank again: it has its answer, or has given up.
    ~Candidate() { own_.wants.store(0, std::memory_order_seq_cst); }
    Candidate(const Candidate&) = delete;
    Candidate& operator=(const Candidate&) = delete;

    bool settled() {
        if (leader() == me()) {
            if (!all_here()) return false;
            decide();
        }
        // In this order: the leader writes it the other way round.
        const std::uint64_t generation = ring_memory_.slot(leader()).decided.load(std::memory_order_seq_cst);
        if (generation <= last_ || own_.invited.load(std::memory_order_seq_cst) != generation) return false;
        answer_ = generation;
        return true;
    }
    std::uint64_t answer() const { return answer_; }

    // Throws where the wait would be in vain.
    void check() const {
        for (int rank : call_.candidates) {
            if (rank == me()) continue;
            if (ring_memory_.dead(rank)) throw Aborted(name(rank) + " has died" + waited());
            if (ring_memory_.has_left_run(rank, call_.run)) throw Aborted(name(rank) + " finished its cell" + waited());
        }
    }
    std::string missing() const {
        std::string text;
        for (int rank : call_.candidates)
            if (rank != me() && !is_here(rank)) text += (text.empty() ? "" : ", ") + name(rank);
        return text.empty() ? "the leader" : text;
    }

   private:
    int me() const { return ring_memory_.local_rank(); }
    static std::string name(int rank) { return "rank " + std::to_string(rank); }
    std::string waited() const { return " while " + name(me()) + " waits for it to join the next generation"; }
    bool is_here(int rank) const { return ring_memory_.slot(rank).wants.load(std::memory_order_seq_cst) != 0; }

    int leader() const { return call_.candidates.front(); }
    bool all_here() const {
        return std::all_of(call_.candidates.begin(), call_.candidates.end(),
                           [&](int rank) { return rank == me() || is_here(rank); });
    }

    void decide() {
        std::uint64_t generation = 0;
        for (int rank : call_.candidates) {
            const RankSlot& slot = ring_memory_.slot(rank);
            generation = std::max({generation, slot.wants.load(std::memory_order_seq_cst),
                                   slot.invited.load(std::memory_order_seq_cst) + 1});
        }
        own_.decided.store(0, std::memory_order_seq_cst);  // no rank mixes this decision with the one before
        for (int rank : call_.candidates) ring_memory_.slot(rank).invited.store(generation, std::memory_order_seq_cst);
        own_.decided.store(generation, std::memory_order_seq_cst);
        ring_bells();
    }

    void ring_bells() const {
        for (int rank : call_.candidates) ring_memory_.slot(rank).bell.ring();
    }

    RingMemory& ring_memory_;
    const GenerationCall& call_;
    RankSlot& own_;
    std::uint64_t last_;  // newest generation that is too old
    std::uint64_t answer_ = 0;
};

}  // namespace

std::uint64_t agree_on_generation(RingMemory& ring_memory, const GenerationCall& call, double timeout,
                                  const Interruption& check) {
    Candidate own(ring_memory, call);
    const std::int64_t deadline = deadline_after(timeout);
    wait_until(
        ring_memory.slot(ring_memory.local_rank()).bell, SpinPolicy{}, [&] { return own.settled(); },
        [&] {
            if (check) check();
            own.check();
            if (is_past(deadline))
                throw Timeout("rank " + std::to_string(ring_memory.local_rank()) + " waited " + seconds_text(timeout) +
                              " for " + own.missing() + " to join the next generation");
        });
    return own.answer();
}

}  // namespace ring
