#include "ring/device/nccl.hpp"

#include <utility>

#include "ring/device/library.hpp"

namespace ring {

void Nccl::check(int result, const char* call, void* communicator) const {
    if (result == kSuccess || result == kInProgress) return;
    std::string text = std::string(call) + ": " + ncclGetErrorString(result);
    const char* last = ncclGetLastError(communicator);
    if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
    throw DeviceError(text);
}

std::string nccl_version_text(int version) {
    if (version < 10000)  // before 2.9: 2.8.4 is 2804
        return std::to_string(version / 1000) + "." + std::to_string(version / 100 % 10) + "." +
               std::to_string(version % 100);
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

std::shared_ptr<const Nccl> load_nccl(const std::string& path, const std::string& otherwise) {
    void* library = open_library("libnccl.so.2", path, otherwise);
    auto nccl = std::make_shared<Nccl>();
    Nccl& all = *nccl;
    find_function(library, "ncclGetVersion", all.ncclGetVersion);
    int version = 0;
    // Not by `check`, whose texts come from a function that an old NCCL may lack.
    if (all.ncclGetVersion(&version) != Nccl::kSuccess) throw DeviceError("ncclGetVersion failed");
    if (version < Nccl::kOldest)
        throw DeviceError("NCCL " + nccl_version_text(version) + " is too old; " + nccl_version_text(Nccl::kOldest) +
                          " or newer is needed");
#define RING_FIND(result, name, parameters) find_function(library, #name, all.name);
    RING_NCCL_FUNCTIONS(RING_FIND)
#undef RING_FIND
    return nccl;
}

std::optional<int> nccl_dtype(DType dtype) {
    const int number = facts(dtype).nccl;
    return number == kNoNumber ? std::nullopt : std::optional(number);
}

std::optional<int> nccl_reduction(ReduceOp op) {
    const int number = is_known(op) ? kNcclReductions[static_cast<std::size_t>(op)] : kNoNumber;
    return number == kNoNumber ? std::nullopt : std::optional(number);
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<const Nccl> nccl, const NcclId& id, Key key, int index)
    : nccl_(std::move(nccl)), id_(id), key_(std::move(key)) {
    NcclConfig config;
    const int size = static_cast<int>(key_.ranks.size());
    nccl_->check(nccl_->ncclCommInitRankConfig(&handle_, size, id, index, &config), "ncclCommInitRankConfig", nullptr);
}

bool NcclCommunicator::ready() const {
    int state = Nccl::kSuccess;
    nccl_->check(nccl_->ncclCommGetAsyncError(handle_, &state), "ncclCommGetAsyncError", handle_);
    nccl_->check(state, "NCCL", handle_);
    return state == Nccl::kSuccess;
}

}  // namespace ring
