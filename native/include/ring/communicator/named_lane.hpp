// The operations of a group that match by name. They have a queue, a gate and mailboxes of their own.
//
// The progress threads exchange names in rounds (ring/group/names.hpp). A rank begins a round when it has news. It
// takes part in another rank's round while it waits for names of its own, or has joined; otherwise no name can be
// complete. After the round all ranks know the same complete names and carry them out in the same order, as few
// operations as `plan_fusion` makes of them; then the next round follows. So the lane is a sequence of operations like
// that of any group, with the same gates, algorithms, mismatches and aborts.
//
//   rank 0   posts a, b        | round |         | round | a+b |
//   rank 1            posts b  | round | posts a | round | a+b |
//
// The first rank that needs the lane's block reserves it, so that operations without names cost nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ring/communicator/communicator.hpp"
#include "ring/group/names.hpp"

namespace ring {

// An operation of this rank that waits for others to post it.
struct NamedWait {
    Header header;
    double seconds = 0.0;
    std::vector<int> missing;  // global ranks, as far as this rank knows
};

class NamedLane {
   public:
    struct Counts {
        std::uint64_t rounds = 0, names = 0, operations = 0;  // carried out so far
        std::uint64_t gates = 0, messages = 0, bytes = 0;     // passed, and sent to other hosts, for all of these
    };

    explicit NamedLane(Communicator& owner);
    // Nothing serves its communicator any more. Operations that have not ended fail.
    ~NamedLane();
    NamedLane(const NamedLane&) = delete;
    NamedLane& operator=(const NamedLane&) = delete;

    // Throws InvalidArgument while one of that name is under way.
    void post(const std::shared_ptr<Work>& work);
    // During its lifetime this rank counts as having posted all names of others.
    class Joining {
       public:
        explicit Joining(NamedLane& lane);
        ~Joining();
        Joining(const Joining&) = delete;
        Joining& operator=(const Joining&) = delete;
        // The join has ended. A join that failed on this rank does not count; joins that all ranks have called do.
        void end(const Work& join);

       private:
        NamedLane& lane_;
    };
    // Whether an operation that this rank has posted has not ended.
    bool has_own() const;
    // This rank posts nothing more.
    void begin_close();
    // Whether there is nothing left to do.
    bool is_quiet() const;
    // Leaves the generation's block: this rank takes part in no further operation.
    void leave() noexcept;
    // Tells the other hosts, when all ranks of this one have left.
    void announce_departure() const noexcept;

    Counts counts() const;
    // The operation that this rank has waited for longest, if it waits.
    std::optional<NamedWait> wait() const;

   private:
    friend class Communicator;
    using Served = Communicator::Served;
    // One operation of the lane's queue: a round, or one of the operations whose names a round completed.
    struct UnderWay {
        std::shared_ptr<Work> work;
        std::vector<NameKey> names;  // of this rank's operations that it carries out; none where it has joined
        bool is_round = false;
    };

    // By the progress thread alone. Never waits.
    Served serve();
    Served serve_lane();
    Served listen();
    bool open(bool called);
    bool has_news() const;
    void tell_what_follows();
    Served begin_round();
    void show_place(const Request& request, Header& header) const;
    Served settle();
    void read_round(const Work& round);
    void carry_out(const std::vector<const Ready*>& ready);
    void push(UnderWay next);
    std::shared_ptr<Work> own(const NameKey& key) const;
    void forget(const NameKey& key);
    void finish(const NameKey& key, const std::shared_ptr<Work>& work, std::exception_ptr error);
    void fail(std::exception_ptr error) noexcept;
    void fail_waiting() noexcept;
    void update_busy();

    // Checks that are due during a wait.
    void check();
    void check_members(bool in_round) const;
    void check_deadlines();
    void note_waits(std::int64_t now);
    void report_waits() const;
    bool in_round() const;
    std::vector<int> missing(const NameKey& key) const;
    std::string missing_text(const std::vector<int>& members) const;

    Communicator& owner_;
    std::shared_ptr<Fabric> fabric_;       // of the lane; null on one host
    std::unique_ptr<Communicator> inner_;  // null before the lane is open
    bool reserved_ = false;                // this rank has reserved its block
    std::vector<std::byte> news_;          // on its way
    std::uint64_t told_joins_ = 0;
    bool told_closing_ = false;
    std::int64_t next_check_ = 0;
    std::set<std::string> reported_;

    // Other threads post, and look.
    mutable std::mutex mutex_;
    std::deque<UnderWay> under_way_;
    NameTable table_;
    std::deque<NameKey> fresh_;                     // not posted in a round yet
    std::deque<NameKey> following_;                 // to be posted when the first of their call has ended
    std::map<NameKey, std::shared_ptr<Work>> own_;  // that have not ended
    std::uint64_t joins_called_ = 0, joins_ended_ = 0;
    bool closing_ = false;
    std::optional<NamedWait> wait_;
    Counts counts_;
    std::uint64_t begun_ = 0;        // operations of the lane's queue
    std::atomic<bool> busy_{false};  // something is left to do or to wait for
};

}  // namespace ring
