// The queue of a group's operations, and whose turn it is: one thread at a time carries out an operation, its caller or
// the progress thread. A closed group queues nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace ring {

class Work;

class OperationQueue {
   public:
    using Entry = std::shared_ptr<Work>;

    // Calls `call` under the lock: no other thread queues or closes meanwhile.
    template <class Call>
    void exclusively(Call&& call) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        call();
    }
    // Begins the turn of this thread, which then carries out `work`. Or queues `work` and returns false: when `queues`
    // is set, another thread has the turn, or the queue is not empty. First calls `check` with whether this thread is
    // in another operation, and before it queues calls `begin`; both may throw.
    template <class Check, class Begin>
    bool enter(const Entry& work, bool queues, Check&& check, Begin&& begin) {
        const std::lock_guard<std::mutex> lock(mutex_);
        check(is_turn_here());
        if (!queues && idle()) {
            turn_ = std::this_thread::get_id();
            return true;
        }
        begin();
        entries_.push_back(work);
        return false;
    }
    // Begins the turn of this thread unless another one has it, operations are queued, or the group is closed.
    bool try_turn() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closed() || !idle()) return false;
        turn_ = std::this_thread::get_id();
        return true;
    }
    // Begins the turn of this thread for the front of the queue, which it returns; null where another thread has the
    // turn, nothing is queued, or `wants` refuses the front.
    template <class Wants>
    Entry take_front(Wants&& wants) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (turn_ != std::thread::id{} || entries_.empty() || !wants(*entries_.front())) return nullptr;
        turn_ = std::this_thread::get_id();
        return entries_.front();
    }
    // Ends the turn, and drops the front of the queue if it has been carried out. Returns the number of works left.
    std::size_t end_turn(bool drops_front) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (drops_front) entries_.pop_front();
        turn_ = {};
        return entries_.size();
    }
    void push_back(Entry work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        entries_.push_back(std::move(work));
    }
    void push_front(Entry work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        entries_.push_front(std::move(work));
    }
    // All queued works, for the owner's destructor: no other thread uses the queue any more.
    const std::deque<Entry>& entries() const { return entries_; }
    // Whether nothing is queued, no thread has the turn, and `also` holds; `also` is called under the lock.
    template <class Also>
    bool is_idle(Also&& also) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return idle() && also();
    }
    // Returns whether this thread is in an operation.
    bool close() {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_.store(true, std::memory_order_release);
        return is_turn_here();
    }
    bool closed() const { return closed_.load(std::memory_order_acquire); }

   private:
    bool idle() const { return entries_.empty() && turn_ == std::thread::id{}; }
    bool is_turn_here() const { return turn_ == std::this_thread::get_id(); }

    mutable std::mutex mutex_;
    std::deque<Entry> entries_;
    std::thread::id turn_;  // empty when no thread has it
    std::atomic<bool> closed_{false};
};

}  // namespace ring
