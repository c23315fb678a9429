#include "ring/group/names.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ring/base/errors.hpp"
#include "ring/group/header_damage.hpp"

namespace ring {
namespace {

struct NewsFront {
    std::uint64_t joins, closing, threshold, posts;
};
static_assert(std::is_trivially_copyable_v<Post>, "posts travel as bytes");

Header joined_header() {
    Header header;
    header.kind = OpKind::Join;
    return header;
}

}  // namespace

std::vector<std::byte> News::encode() const {
    const NewsFront front{joins, closing, threshold, posts.size()};
    std::vector<std::byte> data(sizeof front + posts.size() * sizeof(Post));
    std::memcpy(data.data(), &front, sizeof front);
    if (!posts.empty()) std::memcpy(data.data() + sizeof front, posts.data(), posts.size() * sizeof(Post));
    return data;
}

News News::decode(const std::byte* data, std::size_t bytes) {
    NewsFront front{};
    if (bytes >= sizeof front) std::memcpy(&front, data, sizeof front);
    if (bytes < sizeof front || (bytes - sizeof front) / sizeof(Post) != front.posts)
        throw Error("the news of a rank have " + std::to_string(bytes) + " bytes, which is no number of names");
    News news{front.joins, front.closing, front.threshold, std::vector<Post>(front.posts)};
    if (front.posts > 0) std::memcpy(news.posts.data(), data + sizeof front, front.posts * sizeof(Post));
    for (const Post& post : news.posts) {
        const std::string found = damage(post.header, kNoTensor);
        if (!found.empty()) throw Error("the news of a rank hold a name with " + found + ", which no rank posts");
    }
    return news;
}

void NameTable::add(std::size_t member, const News& news) {
    joins_[member] = news.joins;
    closing_[member] = news.closing != 0;
    for (const Post& post : news.posts) {
        const auto [found, is_new] = entries_.try_emplace(post.key());
        Entry& entry = found->second;
        if (is_new) {
            entry.number = ++last_;
            entry.headers.assign(joins_.size(), joined_header());
            entry.posted.assign(joins_.size(), false);
        }
        entry.headers[member] = post.header;
        entry.posted[member] = true;
    }
}

std::vector<Ready> NameTable::take_ready() {
    std::vector<std::pair<std::uint64_t, Ready>> complete;
    for (auto one = entries_.begin(); one != entries_.end();) {
        const auto& [key, entry] = *one;
        bool all = true;
        for (std::size_t member = 0; all && member < joins_.size(); ++member) all = has(key, entry, member);
        if (all) {
            complete.push_back({entry.number, {key, std::move(one->second.headers)}});
            one = entries_.erase(one);
        } else {
            ++one;
        }
    }
    std::sort(complete.begin(), complete.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Ready> ready;
    ready.reserve(complete.size());
    for (auto& one : complete) ready.push_back(std::move(one.second));
    return ready;
}

std::vector<std::size_t> NameTable::missing(const NameKey& key) const {
    const auto found = entries_.find(key);
    std::vector<std::size_t> members;
    for (std::size_t member = 0; member < joins_.size(); ++member)
        if (found == entries_.end() || !has(key, found->second, member)) members.push_back(member);
    return members;
}

const Header* NameTable::hopeless(std::size_t& member) const {
    for (const auto& [key, entry] : entries_)
        for (member = 0; member < joins_.size(); ++member)
            if (closing_[member] && !has(key, entry, member))
                for (std::size_t poster = 0; poster < joins_.size(); ++poster)
                    if (entry.posted[poster]) return &entry.headers[poster];
    return nullptr;
}

}  // namespace ring
