// A group that its members make without the other ranks of the group that they are in.
//
// Each member prepares its part, shows its card to the other members by whatever they have, and enters with the cards
// of all. The group is complete when its first operation is.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ring/communicator/communicator.hpp"

namespace ring {

// What a member shows to the others.
struct MemberCard {
    std::uint64_t block = kNowhere;  // where the first member on each host has reserved the block of those on its host
    std::uint64_t id = 0;            // between hosts: the group's, of which that of the first member counts
    int number = -1;                 // between hosts: for the tags of what this member is sent
};

class MemberGroup {
   public:
    // `members` are indices in `parent`, this rank's among them. Throws InvalidArgument and OutOfMemory.
    MemberGroup(std::shared_ptr<Communicator> parent, std::vector<int> members);

    MemberCard card() const;
    // Once, with the cards of all members in group order. Throws Aborted when the group's first member on this host has
    // given it up, or the epoch has ended.
    std::shared_ptr<Communicator> enter(const std::vector<MemberCard>& cards);

   private:
    std::shared_ptr<Communicator> parent_;
    std::vector<int> members_;
    std::unique_ptr<BlockReservation> reservation_;
    std::shared_ptr<const TagNumber> number_;
    std::uint64_t id_ = 0;
};

}  // namespace ring
