// NCCL, found at run time, and one nonblocking communicator of it.
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ring/base/dtypes_and_ops.hpp"
#include "ring/device/driver.hpp"

namespace ring {

struct NcclId {
    char bytes[128] = {};
};

// The fields of NCCL 2.18. NCCL copies `size` bytes and reads newer fields only if `version` has them.
struct NcclConfig {
    std::size_t size = 48;
    unsigned magic = 0xcafebeef;
    unsigned version = 21800;
    int blocking = 0;
    int cga_cluster_size = INT_MIN;
    int min_ctas = INT_MIN;
    int max_ctas = INT_MIN;
    const char* net_name = nullptr;
    int split_share = INT_MIN;
};
static_assert(sizeof(NcclConfig) == 48, "the layout that NCCL reads");

// Its functions, as those of the driver.
#define RING_NCCL_FUNCTIONS(X)                                                           \
    X(int, ncclGetVersion, (int*))                                                       \
    X(const char*, ncclGetErrorString, (int))                                            \
    X(const char*, ncclGetLastError, (void*))                                            \
    X(int, ncclGetUniqueId, (NcclId*))                                                   \
    X(int, ncclCommInitRankConfig, (void**, int, NcclId, int, NcclConfig*))              \
    X(int, ncclCommGetAsyncError, (void*, int*))                                         \
    X(int, ncclCommFinalize, (void*))                                                    \
    X(int, ncclCommDestroy, (void*))                                                     \
    X(int, ncclCommAbort, (void*))                                                       \
    X(int, ncclGroupStart, ())                                                           \
    X(int, ncclGroupEnd, ())                                                             \
    X(int, ncclAllReduce, (const void*, void*, std::size_t, int, int, void*, void*))     \
    X(int, ncclReduce, (const void*, void*, std::size_t, int, int, int, void*, void*))   \
    X(int, ncclBroadcast, (const void*, void*, std::size_t, int, int, void*, void*))     \
    X(int, ncclAllGather, (const void*, void*, std::size_t, int, void*, void*))          \
    X(int, ncclReduceScatter, (const void*, void*, std::size_t, int, int, void*, void*)) \
    X(int, ncclSend, (const void*, std::size_t, int, int, void*, void*))                 \
    X(int, ncclRecv, (void*, std::size_t, int, int, void*, void*))                       \
    X(int, ncclRedOpCreatePreMulSum, (int*, const void*, int, int, void*))               \
    X(int, ncclRedOpDestroy, (int, void*))

struct Nccl {
    RING_NCCL_FUNCTIONS(RING_POINTER)

    static constexpr int kSuccess = 0;
    static constexpr int kInProgress = 7;
    // The oldest version supported: in earlier ones, operations of several communicators need a stricter order between
    // hosts than ours have.
    static constexpr int kOldest = 22600;

    // Throws DeviceError where `result` is an error of that communicator, which may be null.
    void check(int result, const char* call, void* communicator) const;
};

// The functions of the NCCL at `path`; where that is empty, of the one that is loaded, which is torch's, else of the
// one at `otherwise`, else of the system's. Throws DeviceError, also for a version that is too old.
std::shared_ptr<const Nccl> load_nccl(const std::string& path, const std::string& otherwise);
// "2.27.5"
std::string nccl_version_text(int version);

// NCCL's number of an element type; none where it lacks the type.
std::optional<int> nccl_dtype(DType dtype);
// NCCL's number of a reduction, or of the one that expresses it; none where it has no such reduction.
std::optional<int> nccl_reduction(ReduceOp op);
constexpr int kNcclAverage = 4;
constexpr int kNcclBytes = 1;  // uint8

// One communicator. The destructor does not end it: its owner gives it to a Reaper first.
class NcclCommunicator {
   public:
    // Distinguishes a rank's communicators, besides their ids.
    struct Key {
        std::vector<int> ranks;  // of the members, in the whole job
        bool by_name = false;    // serves a group's operations that match by name
        bool operator==(const Key& other) const { return ranks == other.ranks && by_name == other.by_name; }
    };
    // Begins to connect. Throws DeviceError.
    NcclCommunicator(std::shared_ptr<const Nccl> nccl, const NcclId& id, Key key, int index);
    NcclCommunicator(const NcclCommunicator&) = delete;
    NcclCommunicator& operator=(const NcclCommunicator&) = delete;

    // Whether the connect or launch under way has succeeded. Throws DeviceError where it has failed.
    bool ready() const;
    const Nccl& nccl() const { return *nccl_; }
    void* handle() const { return handle_; }
    const NcclId& id() const { return id_; }
    const Key& key() const { return key_; }

   private:
    std::shared_ptr<const Nccl> nccl_;
    const NcclId id_;
    const Key key_;
    void* handle_ = nullptr;
};

}  // namespace ring
