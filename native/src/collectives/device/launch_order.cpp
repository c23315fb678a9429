#include "ring/collectives/device/launch_order.hpp"

#include <algorithm>
#include <utility>

namespace ring {

void LaunchOrder::enter(HostGroup& group, std::uint64_t gate, std::uint64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    erase(group);
    candidates_.push_back({&group, gate, id});
}

void LaunchOrder::leave(const HostGroup& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    erase(group);
}

void LaunchOrder::erase(const HostGroup& group) {
    candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(),
                                     [&](const Candidate& one) { return one.group == &group; }),
                      candidates_.end());
}

bool LaunchOrder::is_next(HostGroup& group) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto own =
        std::find_if(candidates_.begin(), candidates_.end(), [&](const Candidate& one) { return one.group == &group; });
    if (own == candidates_.end()) return false;
    const Ticket ticket = group.tickets().look(own->gate);
    if (ticket.state != Ticket::State::Taken) return false;
    group.tickets().pass(ticket.number);  // first, so that the tickets that the other groups take now come later
    return std::none_of(candidates_.begin(), candidates_.end(), [&](const Candidate& one) {
        if (one.group == &group) return false;
        const Ticket other = one.group->tickets().look(one.gate);
        if (other.state == Ticket::State::Later) return false;
        // Tickets that span hosts may have equal numbers.
        return other.state == Ticket::State::Soon ||
               std::make_pair(other.number, one.id) < std::make_pair(ticket.number, own->id);
    });
}

}  // namespace ring
