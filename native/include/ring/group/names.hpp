// What the ranks of a group have posted by name, and which names all of them have: the table that every rank keeps.
//
// In a *round* each rank tells all others its *news*: the names that it has posted since its last round. All ranks read
// the same news in the same order, so their tables are alike, and nobody has to decide for the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ring/group/header.hpp"

namespace ring {

// The key by which ranks match. A header holds only a part of a long name, so the hash of the whole name counts too.
struct NameKey {
    std::string name;
    std::uint64_t hash = 0;
    std::uint64_t joins = 0;  // that had ended before the post; a rank that has called more has joined since

    bool operator<(const NameKey& other) const {
        return std::tie(name, hash, joins) < std::tie(other.name, other.hash, other.joins);
    }
};

// One operation of one rank.
struct Post {
    Header header;
    std::uint64_t hash = 0;
    std::uint64_t joins = 0;

    NameKey key() const { return {header.name, hash, joins}; }
};

// What one rank says in a round.
struct News {
    std::uint64_t joins = 0;      // how often it has called join
    std::uint64_t closing = 0;    // it posts nothing more
    std::uint64_t threshold = 0;  // bytes that it would fuse
    std::vector<Post> posts;

    std::vector<std::byte> encode() const;
    static News decode(const std::byte* data, std::size_t bytes);
};

// An operation that all ranks have posted.
struct Ready {
    NameKey key;
    std::vector<Header> headers;  // by rank; of those that have joined instead, a Join
};

class NameTable {
   public:
    explicit NameTable(std::size_t members) : joins_(members, 0), closing_(members, false) {}

    void add(std::size_t member, const News& news);
    // Removes and returns the complete names, in the order in which they were first posted.
    std::vector<Ready> take_ready();
    bool empty() const { return entries_.empty(); }
    // Members that have yet to post it; all members for an unknown name.
    std::vector<std::size_t> missing(const NameKey& key) const;
    // A name that will never be complete, because `member` has posted its last; null when there is none.
    const Header* hopeless(std::size_t& member) const;

   private:
    struct Entry {
        std::uint64_t number = 0;
        std::vector<Header> headers;
        std::vector<bool> posted;
    };
    bool has(const NameKey& key, const Entry& entry, std::size_t member) const {
        return entry.posted[member] || joins_[member] > key.joins;
    }

    std::map<NameKey, Entry> entries_;
    std::uint64_t last_ = 0;
    std::vector<std::uint64_t> joins_;
    std::vector<bool> closing_;
};

}  // namespace ring
