#include "ring/group/mismatch.hpp"

#include <algorithm>
#include <sstream>
#include <utility>

#include "ring/base/text.hpp"

namespace ring {
namespace {

// Also where both are NaN, which compares unequal to itself.
bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

bool same_shape(const Header& a, const Header& b, int from) {
    if (a.dims != b.dims) return false;
    for (int i = from; i < a.dims; ++i)
        if (a.shape[i] != b.shape[i]) return false;
    return true;
}

// How two calls that should be alike differ: what each of them did, and what to do about it.
struct Difference {
    bool any = false;
    std::string first, second;
    const char* verb = "";
    std::string advice;
};

constexpr const char* kSameOrder = "call the same operations in the same order on every rank";

std::string same(const char* what) { return std::string("call it with the same ") + what + " on every rank"; }

std::string tensors_text(const Header& header) {
    return tensor_text(header) + (header.tensors == 1 ? "" : ", shapes " + digits(header.layout));
}

// With as many digits as tell it from every other number.
std::string number_text(double value) {
    char text[32];
    for (int digits = 6; digits <= 17; ++digits) {
        std::snprintf(text, sizeof text, "%.*g", digits, value);
        if (same_bits(std::strtod(text, nullptr), value)) break;
    }
    return text;
}

std::string scale_text(const Header& header) {
    return "prescale " + number_text(header.prescale) + " and postscale " + number_text(header.postscale);
}

// Sums of a list take an operation for each dtype and device, all others one for each tensor.
std::string operations_text(const Header& header) {
    const std::string number = std::to_string(header.operations);
    if (header.kind != OpKind::Allreduce)
        return "a list of " + number + (header.operations == 1 ? " tensor" : " tensors");
    return "tensors of " + number + (header.operations == 1 ? " dtype and device" : " dtypes or devices");
}

std::string operations_advice(const Header& header) {
    return same(header.kind == OpKind::Allreduce ? "dtypes, on the same devices," : "number of tensors");
}

Difference difference(const Header& a, const Header& b) {
    const auto differ = [&](auto&& text, const char* verb, std::string advice) {
        return Difference{true, text(a), text(b), verb, std::move(advice)};
    };
    if (a.kind != b.kind)
        return differ([](const Header& one) { return std::string(to_string(one.kind)); }, "called", kSameOrder);
    if (a.name[0] != '\0' && b.name[0] != '\0' && std::strncmp(a.name, b.name, kNameBytes) != 0)
        return differ([](const Header& one) { return "the name" + quoted_name(one); }, "passed", kSameOrder);
    if (output_of(a.kind) == Output::Nothing) return {};
    if (a.operations != b.operations) return differ(operations_text, "sent", operations_advice(a));
    if (a.device != b.device)
        return differ([](const Header& one) { return std::string(to_string(one.device)) + " tensors"; }, "sent",
                      "move the tensors to the same kind of device on every rank");
    if (a.dtype != b.dtype) return differ(tensors_text, "sent", same("dtype"));
    if (reduces(a.kind)) {
        if (a.op != b.op)
            return differ([](const Header& one) { return std::string(to_string(one.op)); }, "passed",
                          same("reduction"));
        if (!same_bits(a.prescale, b.prescale) || !same_bits(a.postscale, b.postscale))
            return differ(scale_text, "passed", same("scale factors"));
        if (a.wire != b.wire)
            return differ([](const Header& one) { return std::string(to_string(one.wire)) + " between hosts"; }, "uses",
                          "set RING_WIRE to the same value on every rank");
    }
    if (a.root != b.root)
        return differ([](const Header& one) { return "root rank " + std::to_string(one.root); }, "passed",
                      same("root rank"));
    if (a.tensors != b.tensors)
        return differ([](const Header& one) { return std::to_string(one.tensors) + " tensors"; }, "sent",
                      same("number of tensors"));
    if (output_of(a.kind) == Output::Parts) {
        if (same_shape(a, b, 1)) return {};
        return differ(tensors_text, "sent", same("shape beyond the first dimension"));
    }
    if (a.count != b.count || a.layout != b.layout || !same_shape(a, b, 0))
        return differ(tensors_text, "sent", same("shape"));
    return {};
}

// How the first rank that differs from the one at index `reference` does; ranks that have joined call nothing.
std::string disagreement(const std::vector<Header>& headers, const std::vector<int>& ranks, std::size_t reference,
                         bool is_own) {
    const Header& wanted = headers[reference];
    for (std::size_t i = 0; i < headers.size(); ++i) {
        if (headers[i].kind == OpKind::Join && wanted.kind != OpKind::Join) continue;
        const Difference found = difference(wanted, headers[i]);
        if (!found.any) continue;
        const std::string begin =
            is_own ? "expected " : "rank " + std::to_string(ranks[reference]) + " " + found.verb + " ";
        return begin + found.first + ", rank " + std::to_string(ranks[i]) + " " + found.verb + " " + found.second +
               "; " + found.advice;
    }
    return "";
}

// If one rank differs from all others, which agree: what it did, and what they did. Then all ranks report the same, and
// none of them blames a rank that did as all others.
std::string odd_one(const std::vector<Header>& headers, const std::vector<int>& ranks) {
    std::vector<std::size_t> callers;
    for (std::size_t i = 0; i < headers.size(); ++i)
        if (headers[i].kind != OpKind::Join) callers.push_back(i);
    if (callers.size() < 3) return "";
    const auto differ = [&](std::size_t a, std::size_t b) { return difference(headers[a], headers[b]).any; };
    const bool first_is_odd = differ(callers[0], callers[1]) && !differ(callers[1], callers[2]);
    const std::size_t usual = callers[first_is_odd ? 1 : 0];
    std::vector<std::size_t> odd;
    for (const std::size_t i : callers)
        if (i != usual && differ(usual, i)) odd.push_back(i);
    if (odd.size() != 1) return "";
    for (const std::size_t i : callers)  // one without a name agrees with any
        if (i != odd[0] && !differ(odd[0], i)) return "";
    const Difference found = difference(headers[odd[0]], headers[usual]);
    return "rank " + std::to_string(ranks[odd[0]]) + " " + found.verb + " " + found.first + ", all others " +
           found.verb + " " + found.second + "; " + found.advice;
}

// Barriers and commits, and sums, to which a joined rank adds nothing.
bool works_with_joined(const Header& header) {
    return header.kind == OpKind::Barrier || header.kind == OpKind::Commit ||
           (header.kind == OpKind::Allreduce && is_sum(header.op));
}

}  // namespace

std::string describe_fully(const Header& header) {
    std::ostringstream text;
    text << to_string(header.kind);
    if (reduces(header.kind)) text << ' ' << to_string(header.op);
    text << quoted_name(header);
    if (output_of(header.kind) == Output::Nothing) return text.str();
    text << ' ' << tensors_text(header);
    if (header.operations != 1) text << ", one of " << int{header.operations};
    if (header.device != Device::Cpu) text << " on " << to_string(header.device);
    if (header.root >= 0) text << (header.kind == OpKind::Broadcast ? " from rank " : ", root rank ") << header.root;
    if (header.prescale != 1.0) text << " prescale " << number_text(header.prescale);
    if (header.postscale != 1.0) text << " postscale " << number_text(header.postscale);
    return text.str();
}

std::string find_mismatch(const std::vector<Header>& headers, const std::vector<int>& ranks, int own) {
    // Joined ranks take part in whatever allreduce the others do, so the first rank that has not joined leads.
    std::size_t lead = 0;
    int joined = -1;
    for (std::size_t i = headers.size(); i-- > 0;) {
        if (headers[i].kind == OpKind::Join) {
            joined = ranks[i];
        } else {
            lead = i;
        }
    }
    const Header& first = headers[lead];
    const auto own_index = static_cast<std::size_t>(own);
    std::string why = odd_one(headers, ranks);
    const bool is_odd = !why.empty();
    if (!is_odd) why = disagreement(headers, ranks, lead, lead == own_index);
    // A message is clearest when it compares others with the own rank. A rank that has joined, or gave no name, may
    // differ from none.
    if (!is_odd && !why.empty() && lead != own_index &&
        (headers[own_index].kind != OpKind::Join || first.kind == OpKind::Join)) {
        const std::string from_own = disagreement(headers, ranks, own_index, true);
        if (!from_own.empty()) why = from_own;
    }
    // A rank without a name agrees with every name, so ranks that agree with it may still differ from one another.
    for (std::size_t i = lead + 1; why.empty() && first.name[0] == '\0' && i < headers.size(); ++i) {
        if (headers[i].kind == OpKind::Join || headers[i].name[0] == '\0') continue;
        why = disagreement(headers, ranks, i, i == own_index);
        break;
    }
    if (why.empty() && joined >= 0 && first.kind != OpKind::Join && !works_with_joined(first))
        why = "rank " + std::to_string(joined) + " has joined, and a joined rank takes part in barriers, sums and " +
              "averages only; complete all other operations on every rank before one joins";
    if (why.empty()) return "";
    std::ostringstream text;
    text << why << "\nThe calls at sequence " << first.sequence << ":";
    std::vector<std::pair<std::string, std::vector<int>>> calls;  // in order of their first ranks
    for (std::size_t i = 0; i < headers.size(); ++i) {
        std::string call = describe_fully(headers[i]);
        auto same = std::find_if(calls.begin(), calls.end(), [&](const auto& one) { return one.first == call; });
        if (same == calls.end()) same = calls.insert(same, {std::move(call), {}});
        same->second.push_back(ranks[i]);
    }
    for (const auto& [call, callers] : calls) text << "\n  " << rank_ranges(callers) << ": " << call;
    return text.str();
}

}  // namespace ring
