// The calls that launch each operation on NCCL.
#include <optional>
#include <string>

#include "collectives/device/launch.hpp"
#include "collectives/host/algorithm_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/errors.hpp"
#include "ring/collectives/device/nccl_reduction.hpp"

namespace ring {
namespace {

// The parts of all ranks, in the order of the group.
struct Parts {
    std::vector<std::size_t> counts;  // elements
    std::vector<std::size_t> starts;
    std::size_t total = 0;

    void add(std::size_t count) {
        counts.push_back(count);
        starts.push_back(total);
        total += count;
    }
};

class NcclLaunch : public Launch {
   public:
    using Call = void (NcclLaunch::*)();
    NcclLaunch(const Operation& operation, Call call)
        : Launch(operation),
          call_(call),
          request_(operation.request),
          result_(operation.result),
          nccl_(*operation.nccl),
          lead_(lead_header(operation.headers)),
          size_(static_cast<int>(operation.headers.size())),
          index_(operation.fabric == nullptr
                     ? operation.group.index()
                     : operation.fabric->members(
                           operation.fabric->host())[static_cast<std::size_t>(operation.group.index())]),
          item_(item_size(lead_.dtype)) {
        for (int member = 0; member < size_; ++member) {
            const auto i = static_cast<std::size_t>(member);
            if (lead_.kind == OpKind::Allgather) incoming_.add(operation.headers[i].count);
            if (lead_.kind != OpKind::Alltoall) continue;
            const std::int64_t* splits = operation.agreement != nullptr
                                             ? operation.agreement->splits(member)
                                             : operation.group.splits(member, operation.headers[i].sequence);
            incoming_.add(static_cast<std::size_t>(splits[index_]));
            outgoing_.add(static_cast<std::size_t>(request_.splits[i]));
        }
    }

    void allreduce() {
        if (zeros_) return reduce(zeros_->data(), zeros_->data(), lead_.count);
        for (const Piece& one : request_.pieces) reduce(one.input, one.output, one.count);
    }

    void broadcast() {
        check(api().ncclBroadcast(piece().input, piece().output, lead_.count * item_, kNcclBytes, request_.root,
                                  nccl_.handle(), stream().handle()),
              "ncclBroadcast");
    }

    void reducescatter() {
        const std::int64_t rows = lead_.shape[0];
        const Range own = row_range(lead_.count, rows, size_, index_);
        if (rows % size_ == 0) {
            check(api().ncclReduceScatter(piece().input, piece().output, own.size(), dtype_, reduction_, nccl_.handle(),
                                          stream().handle()),
                  "ncclReduceScatter");
            return;
        }
        for (int member = 0; member < size_; ++member) {
            const Range range = row_range(lead_.count, rows, size_, member);
            if (range.size() == 0) continue;
            check(api().ncclReduce(piece().input + range.begin * item_, piece().output, range.size(), dtype_,
                                   reduction_, member, nccl_.handle(), stream().handle()),
                  "ncclReduce");
        }
    }

    void allgather() {
        std::byte* output = result_.on_device->data();
        bool even = true;
        for (std::size_t count : incoming_.counts) even &= count == incoming_.counts.front();
        if (even) {
            check(api().ncclAllGather(piece().input, output, piece().count * item_, kNcclBytes, nccl_.handle(),
                                      stream().handle()),
                  "ncclAllGather");
            return;
        }
        for (int member = 0; member < size_; ++member) {
            const auto i = static_cast<std::size_t>(member);
            if (incoming_.counts[i] == 0) continue;
            const void* input = member == index_ ? piece().input : output + incoming_.starts[i] * item_;
            check(api().ncclBroadcast(input, output + incoming_.starts[i] * item_, incoming_.counts[i] * item_,
                                      kNcclBytes, member, nccl_.handle(), stream().handle()),
                  "ncclBroadcast");
        }
    }

    void alltoall() {
        for (int member = 0; member < size_; ++member) {
            const auto i = static_cast<std::size_t>(member);
            if (outgoing_.counts[i] > 0)
                check(api().ncclSend(piece().input + outgoing_.starts[i] * item_, outgoing_.counts[i] * item_,
                                     kNcclBytes, member, nccl_.handle(), stream().handle()),
                      "ncclSend");
            if (incoming_.counts[i] > 0)
                check(
                    api().ncclRecv(result_.on_device->data() + incoming_.starts[i] * item_, incoming_.counts[i] * item_,
                                   kNcclBytes, member, nccl_.handle(), stream().handle()),
                    "ncclRecv");
        }
    }

   protected:
    void enqueue() override {
        const DeviceContext::Current current(context());
        if (reduces(lead_.kind)) make_reduction();
        if (output_of(lead_.kind) == Output::Parts) allocate();
        if (request_.kind == OpKind::Join) bring_nothing();
        check(api().ncclGroupStart(), "ncclGroupStart");
        try {
            (this->*call_)();
        } catch (...) {
            api().ncclGroupEnd();
            throw;
        }
        check(api().ncclGroupEnd(), "ncclGroupEnd");
    }

    // NCCL may launch on a thread of its own, and connects in the first operation.
    bool launched() override {
        if (!nccl_.ready()) return false;
        // Now, because the communicator may be aborted before the operation ends.
        if (own_reduction_) check(api().ncclRedOpDestroy(reduction_, nccl_.handle()), "ncclRedOpDestroy");
        own_reduction_ = false;
        return true;
    }

   private:
    const Nccl& api() const { return nccl_.nccl(); }
    void check(int result, const char* call) const { api().check(result, call, nccl_.handle()); }
    const Piece& piece() const { return request_.pieces.front(); }

    void make_reduction() {
        const NcclReduction reduction = *nccl_reduction_for(lead_, size_);
        reduction_ = reduction.op;
        dtype_ = *nccl_dtype(lead_.dtype);
        if (!reduction.scaled) return;
        constexpr int kOnHost = 1;
        check(api().ncclRedOpCreatePreMulSum(&reduction_, &reduction.factor, dtype_, kOnHost, nccl_.handle()),
              "ncclRedOpCreatePreMulSum");
        own_reduction_ = true;
    }

    void allocate() {
        for (std::size_t count : incoming_.counts) result_.counts.push_back(static_cast<std::int64_t>(count));
        result_.bytes = incoming_.total * item_;
        // The caller reads the result on its own stream, which waits for this operation.
        result_.on_device =
            std::make_shared<DeviceMemory>(on_device().context, result_.bytes, stream().handle(), on_device().stream);
    }

    // A rank that has joined takes part with zeros.
    void bring_nothing() {
        const std::size_t bytes = lead_.count * item_;
        zeros_.emplace(on_device().context, bytes, stream().handle(), stream().handle());
        if (bytes == 0) return;
        const Driver& driver = context().driver();
        driver.check(
            driver.cuMemsetD8Async(reinterpret_cast<std::uintptr_t>(zeros_->data()), 0, bytes, stream().handle()),
            "cuMemsetD8Async");
    }

    void reduce(const void* input, void* output, std::size_t count) {
        check(api().ncclAllReduce(input, output, count, dtype_, reduction_, nccl_.handle(), stream().handle()),
              "ncclAllReduce");
    }

    const Call call_;
    const Request& request_;
    Result& result_;
    const NcclCommunicator& nccl_;
    const Header lead_;
    const int size_, index_;
    const std::size_t item_;
    Parts incoming_, outgoing_;
    int reduction_ = 0, dtype_ = 0;
    bool own_reduction_ = false;
    std::optional<DeviceMemory> zeros_;
};

// A group of one rank: the result is a copy of the input.
class DeviceCopy : public Launch {
   public:
    explicit DeviceCopy(const Operation& operation)
        : Launch(operation), request_(operation.request), result_(operation.result) {}

   protected:
    void enqueue() override {
        const std::size_t item = item_size(request_.dtype);
        if (output_of(request_.kind) == Output::Parts) {
            const Piece& piece = request_.pieces.front();
            result_.counts = {static_cast<std::int64_t>(piece.count)};
            result_.bytes = piece.count * item;
            result_.on_device = std::make_shared<DeviceMemory>(on_device().context, result_.bytes, stream().handle(),
                                                               on_device().stream);
            context().copy_within(result_.on_device->data(), piece.input, result_.bytes, stream().handle());
            return;
        }
        for (const Piece& piece : request_.pieces)
            if (piece.output != piece.input)
                context().copy_within(piece.output, piece.input, piece.count * item, stream().handle());
    }

   private:
    const Request& request_;
    Result& result_;
};

}  // namespace

RING_MAKER(make_nccl_allreduce, NcclLaunch, operation, &NcclLaunch::allreduce)
RING_MAKER(make_nccl_reducescatter, NcclLaunch, operation, &NcclLaunch::reducescatter)
RING_MAKER(make_nccl_broadcast, NcclLaunch, operation, &NcclLaunch::broadcast)
RING_MAKER(make_nccl_allgather, NcclLaunch, operation, &NcclLaunch::allgather)
RING_MAKER(make_nccl_alltoall, NcclLaunch, operation, &NcclLaunch::alltoall)
RING_MAKER(make_device_copy, DeviceCopy, operation)

}  // namespace ring
