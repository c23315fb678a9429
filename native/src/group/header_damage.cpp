#include "ring/group/header_damage.hpp"

#include <algorithm>

#include "ring/base/errors.hpp"

namespace ring {
namespace {

std::string beyond(const char* what, int number, int values) {
    return number < values ? "" : std::string(what) + " " + std::to_string(number);
}

template <class Enum>
std::string beyond(const char* what, Enum value) {
    return beyond(what, static_cast<int>(value), kValues<Enum>);
}

}  // namespace

std::string damage(const Header& header, std::size_t inline_bytes) {
    for (const std::string& found : {
             beyond("operation", header.kind),
             beyond("dtype", header.dtype),
             beyond("reduction", header.op),
             beyond("dtype between hosts", header.wire),
             beyond("device", header.device),
             beyond("number of dimensions", header.dims, kMaxDims + 1),
             beyond("flag of the mailbox", header.is_inline, 2),
         })
        if (!found.empty()) return found;
    if (header.tensors < 0) return "number of tensors " + std::to_string(header.tensors);
    if (header.count >= kNoTensor / item_size(header.dtype)) return "count " + std::to_string(header.count);
    if (header.is_inline != 0 && header.count * item_size(header.dtype) > inline_bytes)
        return "a payload of " + std::to_string(header.count) + " elements in a mailbox of " +
               std::to_string(inline_bytes) + " bytes";
    const auto* shape_end = header.shape + header.dims;
    if (std::any_of(header.shape, shape_end, [](std::int64_t one) { return one < 0; })) return "a negative dimension";
    if (std::find(header.name, header.name + kNameBytes, '\0') == header.name + kNameBytes)
        return "a name without an end";
    return "";
}

void check_headers(const std::vector<Header>& headers, const std::vector<int>& ranks, std::size_t inline_bytes) {
    for (std::size_t i = 0; i < headers.size(); ++i) {
        const std::string found = damage(headers[i], inline_bytes);
        if (!found.empty()) throw_damaged(ranks[i], found);
    }
}

bool adds_up(const std::int64_t* splits, int size, std::uint64_t count) {
    std::uint64_t sum = 0;
    for (int i = 0; i < size; ++i) {
        if (splits[i] < 0 || static_cast<std::uint64_t>(splits[i]) > count - sum) return false;
        sum += static_cast<std::uint64_t>(splits[i]);
    }
    return sum == count;
}

void throw_damaged(int rank, const std::string& what) {
    throw Error("rank " + std::to_string(rank) + " sent what no rank writes (" + what +
                "): its memory is damaged, or it has another version; restart all ranks with one version");
}

}  // namespace ring
