// A group that its members create without the other ranks of its parent group.
//
// Each member prepares its part, sends its card to the other members by any means, and enters with the cards of all.
// The group is complete after its first operation.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ring/communicator/communicator.hpp"

namespace ring {

// What a member sends to the others.
struct MemberCard {
    std::uint64_t block = kNowhere;  // the block of the members on this host, which the first of them has reserved
    std::uint64_t id = 0;            // between hosts: the id of the group; that of the first member counts
    int number = -1;                 // between hosts: for the tags of messages to this member
};

class MemberGroup {
   public:
    // `members` are indices in `parent`, this rank's among them. Throws InvalidArgument and OutOfMemory.
    MemberGroup(std::shared_ptr<Communicator> parent, std::vector<int> members);

    MemberCard card() const;
    // Call once, with the cards of all members in group order. Throws Aborted when the group's first member on this
    // host has given up, or the generation has ended.
    std::shared_ptr<Communicator> enter(const std::vector<MemberCard>& cards);

   private:
    std::shared_ptr<Communicator> parent_;
    std::vector<int> members_;
    std::unique_ptr<BlockReservation> reservation_;
    std::shared_ptr<const TagNumber> number_;
    std::uint64_t id_ = 0;
};

}  // namespace ring
