// The collectives of one group: a queue of operations, served inline by the caller or by the progress thread.
//
// Operations of one group match by order of issue. An operation is a small state machine (`advance`) that never
// waits, so one thread serves the heads of many groups and groups cannot deadlock one another.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/algorithm.hpp"
#include "ring/host_group.hpp"

namespace ring {

class Communicator;
class Progress;

// One operation under way, shared by whoever waits for it and whoever carries it out.
class Work {
   public:
    bool done() const { return state_.load(std::memory_order_acquire) != State::Pending; }
    // Valid once done. Rethrows the error of a failed operation.
    void get() const;
    Result& result() { return result_; }
    std::string describe() const { return ring::describe(header_); }

   private:
    friend class Communicator;
    enum class State : int { Pending, Done, Failed };
    void finish(std::exception_ptr error);

    Request request_;
    Header header_;
    std::unique_ptr<Algorithm> algorithm_;
    std::uint64_t gate_ = 0;
    std::uint64_t step_ = 0;
    std::int64_t deadline_ = 0;      // monotonic ns, 0 for none
    std::int64_t next_check_ = 0;    // for dead peers
    bool started_ = false;
    Result result_;

    std::atomic<State> state_{State::Pending};
    std::exception_ptr error_;
    Bell bell_;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
   public:
    // Opens epoch `epoch` (the same growing number on all members) of the members' host. Returns when all have come.
    static std::shared_ptr<Communicator> open(std::shared_ptr<Domain> domain, HostGroup::Members members,
                                              std::uint64_t epoch, double timeout, const Interruption& check);
    ~Communicator();

    int size() const { return group_->size(); }
    int index() const { return group_->index(); }
    const std::vector<int>& ranks() const { return group_->ranks(); }
    const std::shared_ptr<Domain>& domain() const { return group_->shared_domain(); }

    // Carries the operation out in this thread when nothing is queued, else waits for the progress thread to do it.
    // `timeout` in seconds, 0 for none; `check` is called while it waits and may throw.
    std::shared_ptr<Work> run(Request request, double timeout, const Interruption& check);
    std::shared_ptr<Work> start(Request request, double timeout);
    // Ends when the work is done; an interruption aborts the epoch, because the work cannot be taken back.
    void wait(Work& work, double timeout, const Interruption& check);

    // The communicator of a group that a Group operation has made.
    std::shared_ptr<Communicator> subgroup(const Work& work) const;

    void abort(const std::string& reason);
    bool aborted() const { return group_->aborted(); }
    // Lets own operations end, then leaves the group. Later operations throw.
    void close(const Interruption& check);
    bool closed() const { return closed_.load(std::memory_order_acquire); }
    std::vector<RankActivity> activity() const { return group_->activity(); }

   private:
    friend class Progress;
    enum class Served { Idle, Waiting, Advanced };

    Communicator(std::shared_ptr<HostGroup> group, std::shared_ptr<HostGroup> epoch,
                 std::shared_ptr<Progress> progress);
    std::shared_ptr<Work> make_work(Request request, double timeout) const;
    void validate(const Request& request) const;

    // The state machine. Only one thread at a time is in it: the inline caller or the progress thread.
    void begin(Work& work);
    bool advance(Work& work);
    void check_waiting(Work& work);
    void fail(Work& work, std::exception_ptr error);
    Served serve();
    void enqueue(std::shared_ptr<Work> work);
    std::string locate(const Work& work) const;

    std::shared_ptr<HostGroup> group_;
    std::shared_ptr<HostGroup> epoch_;
    std::shared_ptr<Progress> progress_;
    std::uint64_t sequence_ = 0;
    std::atomic<bool> closed_{false};

    mutable std::mutex mutex_;
    std::deque<std::shared_ptr<Work>> queue_;
    bool inline_active_ = false;
};

}  // namespace ring
