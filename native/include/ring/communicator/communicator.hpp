// The collectives of one group: a queue of operations, served inline by the caller or by the progress thread.
//
// Operations of one group match by order of issue; those that are started with a name go to its `NamedLane` and match
// by name. An operation is a small state machine (`advance`) that never waits, so one thread serves the heads of many
// groups and groups cannot deadlock one another.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ring/base/text.hpp"
#include "ring/collectives/host/algorithm.hpp"
#include "ring/collectives/inter_host/fabric.hpp"
#include "ring/collectives/inter_host/standstill_watch.hpp"
#include "ring/collectives/paths.hpp"
#include "ring/communicator/operation_queue.hpp"
#include "ring/communicator/work.hpp"
#include "ring/group/host_group.hpp"
#include "ring/group/recorder.hpp"
#include "ring/messages/point_to_point.hpp"

namespace ring {

class Communicator;
class DeviceOpening;
class DeviceSide;
class DeviceStream;
class Devices;
class MemberGroup;
class NamedLane;
class Progress;
struct SmallAllreduce;

class Communicator {
   public:
    struct Setup {
        std::shared_ptr<RingMemory> ring_memory;
        std::vector<int> ranks;      // of all members, in the whole job
        std::vector<int> local;      // local ranks in the ring memory of the members on this host, in group order
        std::vector<int> host_of;    // of all members; empty when they share this host
        std::vector<int> addresses;  // of all members on the link
        std::shared_ptr<Link> link;
        int index = 0;  // of this process in the group
        std::uint64_t generation = 0;
        std::uint64_t run = 0;         // number of the run that the generation belongs to; 0 for none
        std::int64_t disruptions = 0;  // a number; all ranks get the maximum
        Options options;
        std::shared_ptr<Devices> devices;   // null where tensors on devices are refused
        std::shared_ptr<OperationLog> log;  // null where the last operations are not kept
    };
    // Opens the generation of that number, which grows and is the same on all members. Returns when all have come.
    static std::shared_ptr<Communicator> open(Setup setup, double timeout, const Interruption& check);
    ~Communicator();

    int size() const { return static_cast<int>(ranks().size()); }
    int index() const { return index_; }
    const std::vector<int>& ranks() const { return topology_.ranks; }
    // An error that names this rank and the operation.
    InvalidArgument invalid(const Request& request, const std::string& why) const;
    // The host of each member; empty when all share one.
    std::vector<int> host_of() const { return fabric_ ? fabric_->host_of() : std::vector<int>{}; }
    const std::shared_ptr<RingMemory>& ring_memory() const { return group_->shared_ring_memory(); }

    // Carries out the operation in this thread when nothing is queued, else waits for the progress thread to do it, or
    // to launch it on a device. `timeout` in seconds, 0 for none; `check` is called during the wait and may throw.
    std::shared_ptr<Work> run(Request request, double timeout, const Interruption& check);
    // The same; counts the time of the caller, and throws the error of the operation.
    std::shared_ptr<Work> call(Request request, double timeout, const Interruption& check);
    // A barrier whose outcome all ranks share. On one host it succeeds on all ranks or throws on all of them, whatever
    // happens meanwhile: it returns even if `check` throws, when the other ranks have committed. Between hosts no
    // exchange can decide for all at one moment: after an abort or an interrupt a host waits some time for the messages
    // of the others, and only the death of a rank or a link in that time can leave the outcomes different.
    // Each rank gives the number of the newest change that it has received; returns the least number, which all ranks
    // have. It is 0 while a rank has joined, because that rank takes no step.
    std::uint64_t commit(std::string name, std::uint64_t newest, double timeout, const Interruption& check,
                         std::uint32_t site = 0);
    // `run` for an allreduce that fits the mailboxes of one host, while nothing is queued; for any other, returns false
    // and does nothing. `before_wait` is called once unless the other ranks have already come; it returns the site of
    // the caller.
    bool allreduce_small(const SmallAllreduce& call, double timeout, const Interruption& check,
                         const std::function<std::uint32_t()>& before_wait);
    // `start` for such an allreduce; `work` stays null where it has completed at once.
    bool start_small(const SmallAllreduce& call, double timeout, std::shared_ptr<Work>& work);
    // Whether the work is done. A small operation belongs to no thread, so this call polls the other ranks up to
    // `looks` times and takes the result.
    bool look(Work& work, int looks = 1);
    // The same for at most some 2 µs, the time for which a caller may hold the GIL.
    bool look_briefly(Work& work) { return look(work, group_->spin().yield ? 1 : kFewLooks); }
    // Queues the request. One with a name matches by name, in any order; throws InvalidArgument while another of that
    // name is under way. `first` is the first operation of the same call: the others begin when the ranks have agreed
    // on it and on the number of operations, and fail with it.
    std::shared_ptr<Work> start(Request request, double timeout, std::shared_ptr<const Work> first = nullptr);
    // From now on names are only for errors and timelines, and queued operations match by order.
    void match_in_order() { in_order_.store(true, std::memory_order_relaxed); }
    // Queues the request; it matches by order, whatever its name.
    std::shared_ptr<Work> enqueue(Request request, double timeout, std::shared_ptr<const Work> first = nullptr);
    // Returns when the work is done. An interruption aborts the generation, because work under way cannot be cancelled.
    void wait(Work& work, double timeout, const Interruption& check);
    // The same, but also returns when the work was launched on a device.
    void wait_launched(Work& work, double timeout, const Interruption& check);

    // Messages to and from members (group indices); `from` may be PointToPoint::kAny. The progress thread carries a
    // message while its caller does not wait for it.
    std::shared_ptr<Message> send(int to, int tag, const void* data, std::uint64_t count, DType dtype, double timeout,
                                  bool attended);
    std::shared_ptr<Message> receive(int from, int tag, void* data, std::uint64_t count, DType dtype, double timeout,
                                     bool attended);
    void wait(Message& message, double timeout, const Interruption& check);

    void abort(std::string_view reason) noexcept;
    bool aborted() const { return group_->aborted(); }
    // Waits for the operations of this rank, on any thread, then leaves the group. Later operations throw. An
    // interruption aborts the generation; so does a call from within an operation (in a signal handler), which cannot
    // wait for it. Throws the error of an operation that failed on its device if no call has raised it: one of this
    // group, or of any group where this is the first group of the generation.
    void close(const Interruption& check);
    bool closed() const { return queue_.closed(); }
    // The maximum of the numbers that the ranks gave to `open`; 0 for a group in a generation.
    std::int64_t disruptions() const { return disruptions_; }
    // Totals of this rank's operations that match by order, since the group began.
    struct Counts {
        std::uint64_t operations = 0, gates = 0;
        std::vector<Fabric::Sent> sent;  // to each host; empty on one host
    };
    Counts counts() const;
    // Shared by all groups of the generation.
    Recorder& recorder() const { return *generation_.recorder; }
    // `work` is done; its caller has been in it, or has waited for it, since `begin`. Adds the part of that time in
    // which it waited for late ranks, before any data moved.
    void note_caller(const Work& work, std::int64_t begin) const;
    std::vector<RankActivity> activity() const { return group_->activity(); }
    const NamedLane& named() const { return *named_; }
    // "nccl" or "host" with the reason, once the ranks have agreed on what moves tensors on devices; else empty.
    std::pair<std::string, std::string> device_transport() const;

   private:
    friend class DeviceOpening;
    friend class DeviceSide;
    friend class Progress;
    friend class MemberGroup;
    friend class NamedLane;
    // Blocked: waits for a gate or the link. OnDevice: a device works, and no thread need wait for it. Polling: waits
    // for the link or a device, which ring no bell.
    enum class Served { Idle, Blocked, OnDevice, Polling, Moved, Done };

    // Shared by the communicators of one generation.
    struct Generation {
        std::shared_ptr<HostGroup> group;
        std::shared_ptr<Fabric> fabric;  // null on one host
        std::shared_ptr<Progress> progress;
        std::shared_ptr<Recorder> recorder;
        std::shared_ptr<StandstillWatch> standstill;
        std::shared_ptr<DeviceStream> devices;  // null where tensors on devices are refused
        std::uint64_t number = 0;
    };

    Communicator(std::vector<int> ranks, int index, std::shared_ptr<HostGroup> group, std::shared_ptr<Fabric> fabric,
                 Generation generation);
    // The communicator on which the named lane of `owner` carries out its operations.
    Communicator(const Communicator& owner, std::shared_ptr<HostGroup> group, std::shared_ptr<Fabric> fabric);
    void run(const std::shared_ptr<Work>& work, const Interruption& check);
    std::shared_ptr<Work> make_work(Request request, double timeout) const;
    std::shared_ptr<Work> prepare(Request request, double timeout) const;
    void validate(const Request& request) const;
    HostGroup::Members members_here(const std::vector<int>& indices) const;

    // Ends this thread's turn. `drops_front`: removes the front of the queue, which has been carried out.
    // `front_has_arrived`: the queue has one operation, and no other rank waits for this one in it.
    void end_turn(bool drops_front = false, bool front_has_arrived = false);
    // An abort by a rank that has passed the commit may overtake the commit's messages between hosts. No wait is long
    // enough for all links, and an interrupt may take a second; the next step finds ranks that have parted.
    static constexpr std::int64_t kCommitPatience = 500'000'000;  // ns
    static constexpr int kFewLooks = 50;
    static constexpr int kManyLooks = 1000;  // some 50 µs
    struct Arrival;
    bool post_small(const SmallAllreduce& call, Arrival& arrival);
    bool complete_small(const SmallAllreduce& call, Arrival& arrival);
    bool complete_started(Work& work);
    std::shared_ptr<Work> arrived_work(const SmallAllreduce& call, Arrival& arrival, double timeout, bool queued);
    // One step of the operation at the front of the queue, in this thread's turn.
    Served advance(Work& work);
    // Carries out the work, by the thread whose turn it is.
    void carry_out(Work& work, const Interruption& check);

    // The state machine. Only one thread at a time is in it: the inline caller or the progress thread.
    void begin(Work& work);
    void place_tensors(Work& work) const;
    void check_posted(const std::vector<Header>& headers) const;
    void move_to_ring(Work& work);
    std::unique_ptr<Algorithm> make_algorithm(Work& work, const std::vector<Header>& headers);
    Served attempt(Work& work);
    Served take_step(Work& work, Step step);
    Served complete(Work& work);
    void note(Work& work, Phase phase);
    void end(Work& work);
    void check_waiting(Work& work, const Interruption& check);
    void warn_of_stall(Work& work, std::int64_t now) const;
    // Whether this rank waits for the one of its host that waits for other hosts, and knows which.
    bool awaits_leader(const Work& work) const;
    // Who has not come, for whom this rank waits.
    std::string missing(const Work& work) const;
    void report_wait(Work& work) const;
    std::string awaited_text(const Work& work, const char* how) const;
    void fail(Work& work, std::exception_ptr error) noexcept;
    bool complete_in_spite(Work& work) noexcept;
    bool explain(const Work& work, std::exception_ptr& error);
    std::exception_ptr stopped(const Work& work, const char* reason) const;
    void keep_tensors_until_quiet(const Work& work) noexcept;
    void announce_abort() noexcept;
    void leave() noexcept;
    void leave_with_generation() noexcept;
    // Call before an operation begins or is queued, while no thread closes the queue.
    void check_open(const Request& request) const;
    void wait_until_ready(Work& work, bool (Work::*ready)() const, double timeout, const Interruption& check);
    Served serve();
    Served serve_queue();
    void wait_for_names(const Request& request, const Interruption& check);
    Served serve_messages();
    void check_member(OpKind kind, int member) const;
    void read_notices();
    // Makes `fused` wait on the device for the tensors of `part`.
    static void share_device(Work& fused, const Work& part);
    int rank() const { return ranks()[static_cast<std::size_t>(index_)]; }
    std::vector<int> ranks_of(const std::vector<int>& members) const { return ring::ranks_of(ranks(), members); }
    std::string who() const { return "rank " + std::to_string(rank()); }
    std::string locate(const Work& work) const;

    int index_;
    std::shared_ptr<HostGroup> group_;
    std::shared_ptr<Fabric> fabric_;
    Topology topology_;
    Generation generation_;
    int number_;  // of this group in the generation
    LogGroup log_group_;
    std::int64_t disruptions_ = 0;
    std::uint64_t sequence_ = 0;  // written by the thread that carries out an operation

    std::unique_ptr<PointToPoint> point_to_point_;  // null in the lane of named operations
    std::int64_t next_look_ = 0;                    // when the progress thread next checks the peers of messages

    OperationQueue queue_;
    std::atomic<bool> in_order_{false};  // after match_in_order()
    Doorbell idle_;                      // rings when an operation has ended
    std::unique_ptr<NamedLane> named_;
    std::unique_ptr<DeviceSide> device_;  // null where tensors on devices are refused
};

}  // namespace ring
