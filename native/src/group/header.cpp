#include "ring/group/header.hpp"

#include <algorithm>
#include <cstdio>
#include <sstream>

namespace ring {
namespace {

std::string quoted_name(const Header& header) {
    return header.name[0] == '\0' ? "" : " '" + std::string(header.name) + "'";
}

// Enough of a hash to see that two differ.
std::string digits(std::uint64_t hash) {
    char text[9];
    std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(hash));
    return text;
}

// Also where both are NaN, which compares unequal to itself.
bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

std::string shape_text(const Header& header) {
    if (header.tensors != 1)
        return std::to_string(header.tensors) + " tensors, " + std::to_string(header.count) + " elements, shapes " +
               digits(header.layout);
    std::string text = "[";
    for (int i = 0; i < header.dims; ++i) text += (i ? ", " : "") + std::to_string(header.shape[i]);
    return text + "]";
}

bool reduces(OpKind kind) { return kind == OpKind::Allreduce || kind == OpKind::ReduceScatter || kind == OpKind::Step; }

bool same_shape(const Header& a, const Header& b, int from) {
    if (a.dims != b.dims) return false;
    for (int i = from; i < a.dims; ++i)
        if (a.shape[i] != b.shape[i]) return false;
    return true;
}

// What is different between two calls that should be the same; null when nothing is.
const char* difference(const Header& a, const Header& b) {
    if (a.kind != b.kind) return "operation";
    if (a.name[0] != '\0' && b.name[0] != '\0' && std::strncmp(a.name, b.name, kNameBytes) != 0) return "name";
    if (a.kind == OpKind::Barrier || a.kind == OpKind::Join) return nullptr;
    if (a.kind == OpKind::Group) return a.layout != b.layout ? "ranks of the new group" : nullptr;
    if (a.dtype != b.dtype) return "dtype";
    if (reduces(a.kind)) {
        if (a.op != b.op) return "reduction";
        if (!same_bits(a.prescale, b.prescale) || !same_bits(a.postscale, b.postscale)) return "scale factor";
        if (a.wire != b.wire) return "dtype between hosts (RING_WIRE)";
    }
    if (a.kind == OpKind::Broadcast && a.root != b.root) return "root rank";
    if (a.kind == OpKind::Step && a.layout != b.layout) return "options of the optimizer (learning rate, say)";
    if (a.tensors != b.tensors) return "number of tensors";
    if (a.kind == OpKind::Allgather || a.kind == OpKind::Alltoall)
        return same_shape(a, b, 1) ? nullptr : "shape beyond the first dimension";
    if (a.count != b.count || a.layout != b.layout || !same_shape(a, b, 0)) return "shape";
    return nullptr;
}

}  // namespace

void set_name(Header& header, const std::string& name) {
    std::string text = name.substr(0, name.find('\0'));
    if (text.size() != name.size() || text.size() >= kNameBytes) {
        std::uint64_t hash = 1469598103934665603ull;  // FNV-1a
        for (char byte : name) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
        const std::string end = "~" + digits(hash ^ hash >> 32);
        std::size_t length = std::min(text.size(), kNameBytes - 1 - end.size());
        // A UTF-8 character is not cut in two: its bytes after the first are 10xxxxxx.
        while (length < text.size() && length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80)
            --length;
        text = text.substr(0, length) + end;
    }
    std::memcpy(header.name, text.c_str(), text.size() + 1);
}

std::string describe(const Header& header) {
    return std::string(to_string(header.kind)) + quoted_name(header) + " (sequence " + std::to_string(header.sequence) +
           ")";
}

std::string describe_fully(const Header& header) {
    std::ostringstream text;
    text << to_string(header.kind);
    if (reduces(header.kind)) text << ' ' << to_string(header.op);
    text << quoted_name(header);
    if (header.kind == OpKind::Barrier || header.kind == OpKind::Join) return text.str();
    if (header.kind == OpKind::Group) return text.str() + " of " + std::to_string(header.count) + " ranks";
    text << ' ' << to_string(header.dtype) << ' ' << shape_text(header);
    if (header.kind == OpKind::Step) text << " options " << digits(header.layout);
    if (header.kind == OpKind::Broadcast) text << " from rank " << header.root;
    if (header.prescale != 1.0) text << " prescale " << header.prescale;
    if (header.postscale != 1.0) text << " postscale " << header.postscale;
    return text.str();
}

std::string find_mismatch(const std::vector<Header>& headers, const std::vector<int>& ranks) {
    // Joined ranks take part in whatever allreduce the others do, so the first rank that has not joined leads.
    std::size_t lead = 0;
    bool any_joined = false;
    for (std::size_t i = headers.size(); i-- > 0;) {
        if (headers[i].kind == OpKind::Join) {
            any_joined = true;
        } else {
            lead = i;
        }
    }
    const Header& first = headers[lead];
    const char* what = nullptr;
    if (any_joined && first.kind != OpKind::Join) {
        const bool zeros_make_sense =
            first.kind == OpKind::Barrier ||
            (first.kind == OpKind::Allreduce && (first.op == ReduceOp::Sum || first.op == ReduceOp::Average));
        if (!zeros_make_sense) what = "operation (a joined rank takes part in barriers, sums and averages only)";
    }
    for (std::size_t i = 0; i < headers.size() && what == nullptr; ++i)
        if (headers[i].kind != OpKind::Join || first.kind == OpKind::Join) what = difference(first, headers[i]);
    if (what == nullptr) return "";

    std::ostringstream text;
    text << "ranks do not agree on the " << what << " at sequence " << first.sequence << ":";
    for (std::size_t i = 0; i < headers.size(); ++i)
        text << "\n  rank " << ranks[i] << ": " << describe_fully(headers[i]);
    text << "\nCall the same collectives with the same arguments in the same order on every rank of the group.";
    return text.str();
}

}  // namespace ring
