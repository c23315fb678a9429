#include "ring/group/tickets.hpp"

namespace ring {
namespace {

// What stands in the block: nothing yet, that a number is being proposed, or the number and whether it is final.
constexpr std::uint64_t kNone = 0;
constexpr std::uint64_t kProposing = ~std::uint64_t{0};
constexpr std::uint64_t proposed(std::uint64_t number) { return number << 1; }
constexpr std::uint64_t taken(std::uint64_t number) { return number << 1 | 1; }

}  // namespace

void Tickets::take() {
    block_.ticket.store(between_hosts_ ? kNone : taken(generation_.tickets.fetch_add(1, std::memory_order_seq_cst) + 1),
                        std::memory_order_seq_cst);
}

std::uint64_t Tickets::propose() {
    block_.ticket.store(kProposing, std::memory_order_seq_cst);
    const std::uint64_t number = generation_.tickets.fetch_add(1, std::memory_order_seq_cst) + 1;
    block_.ticket.store(proposed(number), std::memory_order_seq_cst);
    return number;
}

void Tickets::decide(std::uint64_t number) {
    pass(number);
    block_.ticket.store(taken(number), std::memory_order_seq_cst);
}

// All loads and stores here are in one order with the gate's. A rank that sees that not all have arrived, or that
// nothing is proposed, looks before the ticket is taken, so the ticket is greater than all that it has passed.
Ticket Tickets::look(std::uint64_t gate) const {
    if (block_.released.load(std::memory_order_seq_cst) < gate) {
        const std::uint64_t all = gate * static_cast<std::uint64_t>(block_.size);
        const bool complete = block_.arrived.load(std::memory_order_seq_cst) >= all;
        return {complete && !between_hosts_ ? Ticket::State::Soon : Ticket::State::Later, 0};
    }
    const std::uint64_t word = block_.ticket.load(std::memory_order_seq_cst);
    if (word == kNone) return {Ticket::State::Later, 0};
    if (word == kProposing) return {Ticket::State::Soon, 0};
    return {(word & 1) != 0 ? Ticket::State::Taken : Ticket::State::Proposed, word >> 1};
}

void Tickets::pass(std::uint64_t number) {
    std::uint64_t last = generation_.tickets.load(std::memory_order_seq_cst);
    while (last < number && !generation_.tickets.compare_exchange_weak(last, number, std::memory_order_seq_cst)) {
    }
}

}  // namespace ring
