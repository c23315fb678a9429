#include "collectives/device/launch.hpp"

#include <algorithm>
#include <memory>

#include "ring/collectives/inter_host/link_model.hpp"

namespace ring {

Launch::Launch(const Operation& operation)
    : group_(operation.group),
      fabric_(operation.fabric),
      stream_(*operation.stream),
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
    // The transfers own the memory, because a message may still arrive after this has been given up.
    const auto exchange = [&](int from, int to) {
        landing_->push_back({greatest_, 0});
        transfers_->receive(fabric_->members(from).front(), &landing_->back().theirs, sizeof greatest_);
        transfers_->send(fabric_->members(to).front(), &landing_->back().own, sizeof greatest_);
    };
    const auto hosts = static_cast<std::uint64_t>(fabric_->hosts());
    if (!transfers_) {
        landing_ = std::make_shared<std::deque<Numbers>>();
        transfers_.emplace(*fabric_, Fabric::kData, landing_);
        greatest_ = group_.tickets().propose();
        if (agree_directly(hosts)) {
            for (int host = 0; host < fabric_->hosts(); ++host)
                if (host != fabric_->host()) exchange(host, host);
        } else {
            rounds_ = dissemination_plan(fabric_->hosts(), fabric_->host());
        }
    }
    for (;; ++round_) {
        if (!transfers_->done()) return Step::AwaitsLink;
        for (const Numbers& one : *landing_) greatest_ = std::max(greatest_, one.theirs);
        if (round_ == rounds_.size()) break;
        exchange(rounds_[round_].from, rounds_[round_].to);
    }
    group_.tickets().decide(greatest_);
    return Step::Gate;
}

}  // namespace ring
