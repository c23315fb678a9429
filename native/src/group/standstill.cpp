#include "ring/group/standstill.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "ring/base/text.hpp"
#include "ring/group/block.hpp"

namespace ring {
namespace {

// The ranks of "0, 2, ...".
std::vector<int> numbers_of(const std::string& text) {
    std::vector<int> numbers;
    std::istringstream left(text);
    for (int number = 0; left >> number; left.ignore()) numbers.push_back(number);
    return numbers;
}

}  // namespace

void Standstill::add(std::uint64_t key, std::uint32_t needed, std::string_view text) {
    if (count == kMost) return;
    Awaited& one = awaited[count++];
    one = {key, needed};
    set_text(one.text, text);
}

void StandingRanks::add(int rank, const Standstill& one) {
    for (std::size_t i = 0; i < std::min<std::size_t>(one.count, Standstill::kMost); ++i) {
        Line line{one.awaited[i]};
        set_text(line.ranks, std::to_string(rank));
        add(line);
    }
}

void StandingRanks::add(const Line& line) {
    const auto same = std::find_if(lines_.begin(), lines_.end(), [&](const Line& one) {
        return one.awaited.key == line.awaited.key && text_of(one.awaited.text) == text_of(line.awaited.text);
    });
    if (same == lines_.end()) {
        lines_.push_back(line);
        return;
    }
    same->awaited.callers += line.awaited.callers;
    std::vector<int> ranks = numbers_of(text_of(same->ranks)), more = numbers_of(text_of(line.ranks));
    ranks.insert(ranks.end(), more.begin(), more.end());
    std::sort(ranks.begin(), ranks.end());
    std::string text;
    for (const int rank : ranks) {
        const std::string longer = text + (text.empty() ? "" : ", ") + std::to_string(rank);
        if (longer.size() >= sizeof same->ranks - 5) break;
        text = longer;
    }
    const bool is_all = std::count(text.begin(), text.end(), ',') + 1u == same->awaited.callers;
    set_text(same->ranks, is_all ? text : text + ", ...");
}

std::string StandingRanks::encode() const {
    const std::size_t lines = std::min(lines_.size(), (kReasonBytes - 1) / sizeof(Line));
    return {reinterpret_cast<const char*>(lines_.data()), lines * sizeof(Line)};
}

void StandingRanks::add_encoded(std::string_view bytes) {
    for (; bytes.size() >= sizeof(Line); bytes.remove_prefix(sizeof(Line))) {
        Line line;
        std::memcpy(&line, bytes.data(), sizeof line);
        add(line);
    }
}

std::string StandingRanks::mismatch() const {
    bool by_name = false, by_order = false;
    std::string table;
    std::vector<Line> sorted = lines_;  // hosts tell of theirs in any order
    std::stable_sort(sorted.begin(), sorted.end(), [](const Line& a, const Line& b) {
        return numbers_of(text_of(a.ranks)) < numbers_of(text_of(b.ranks));
    });
    for (const Line& line : sorted) {
        std::uint64_t callers = 0;
        for (const Line& other : lines_)
            if (other.awaited.key == line.awaited.key) callers += other.awaited.callers;
        if (line.awaited.key != 0 && callers >= line.awaited.needed) return "";
        const std::string text = text_of(line.awaited.text);
        by_name |= text.find(kByName) != std::string::npos;
        by_order |= text.find(kByOrder) != std::string::npos;
        table += (line.awaited.callers == 1 ? "\n  rank " : "\n  ranks ") + text_of(line.ranks) + ": " + text;
    }
    if (lines_.empty()) return "";
    const char* const advice =
        by_name && by_order
            ? "call the same operations on every rank, and each of them by name (asynchronously, or in a graph of "
              "TensorFlow 1) on all ranks or by order on all"
            : "call the same operations on every rank";
    return std::string("no rank can continue, because each waits for calls that the others do not make; ") + advice +
           ". What they wait for:" + table;
}

}  // namespace ring
