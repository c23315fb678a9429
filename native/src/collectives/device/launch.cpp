#include "collectives/device/launch.hpp"

#include <algorithm>
#include <memory>

namespace ring {

Launch::Launch(const Operation& operation)
    : group_(operation.group),
      fabric_(operation.fabric),
      stream_(operation.devices->stream()),
      on_device_(*operation.on_device),
      has_ticket_(operation.fabric == nullptr) {}

Launch::~Launch() { stream_.release(this); }

Step Launch::advance(std::uint64_t gates) {
    if (!has_ticket_) return take_ticket(gates);
    if (!on_device_.issued) {
        if (!stream_.order().is_next(group_) || !stream_.claim(this)) return Step::AwaitsDevice;
        for (const auto& ready : on_device_.ready) ready->hold_back(stream_.handle());
        on_device_.issued = true;
        enqueue();
    }
    if (!launched()) return Step::AwaitsDevice;
    on_device_.done = context().event_on(stream_.handle());
    stream_.order().leave(group_);
    stream_.release(this);
    return Step::Done;
}

Step Launch::take_ticket(std::uint64_t gates) {
    if (gates > 0) {
        has_ticket_ = true;
        return Step::Moved;
    }
    if (group_.index() != 0) return Step::Gate;
    if (!transfers_) {
        // The transfers own the memory, because a message may still arrive after this has been given up.
        auto landing = std::make_shared<std::vector<std::uint64_t>>(static_cast<std::size_t>(fabric_->hosts()));
        landing_ = landing;
        transfers_.emplace(*fabric_, Fabric::kData, landing);
        std::uint64_t& own = (*landing)[static_cast<std::size_t>(fabric_->host())];
        own = group_.tickets().propose();
        for (int host = 0; host < fabric_->hosts(); ++host) {
            if (host == fabric_->host()) continue;
            const int leader = fabric_->members(host).front();
            transfers_->receive(leader, &(*landing)[static_cast<std::size_t>(host)], sizeof own);
            transfers_->send(leader, &own, sizeof own);
        }
    }
    if (!transfers_->done()) return Step::AwaitsLink;
    group_.tickets().decide(*std::max_element(landing_->begin(), landing_->end()));
    return Step::Gate;
}

}  // namespace ring
