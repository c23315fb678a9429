#include "ring/group/header.hpp"

#include <algorithm>

#include "ring/base/hash.hpp"
#include "ring/base/text.hpp"

namespace ring {
namespace {

// FNV-1a of words, plus what it lacks: a word also changes bits below its own.
std::uint64_t add_word(std::uint64_t hash, std::uint64_t word) {
    hash = (hash ^ word) * 1099511628211ull;
    return hash ^ hash >> 32;
}

}  // namespace

std::uint64_t add_shape(std::uint64_t hash, const std::int64_t* shape, int dims) {
    hash = add_word(hash, static_cast<std::uint64_t>(dims));
    for (int i = 0; i < dims; ++i) hash = add_word(hash, static_cast<std::uint64_t>(shape[i]));
    return hash;
}

void set_digest(Header& header) {
    std::uint64_t hash = add_shape(kNoShapes, header.shape, header.dims);
    static_assert(kNameBytes % sizeof(std::uint64_t) == 0, "a name is read as words");
    for (std::size_t at = 0; at < kNameBytes && header.name[at] != '\0'; at += sizeof(std::uint64_t)) {
        std::uint64_t word;
        std::memcpy(&word, header.name + at, sizeof word);
        hash = add_word(hash, word);
    }
    header.digest = hash;
}

void set_name(Header& header, std::string_view name) {
    if (name.empty()) return;
    std::string text(name.substr(0, name.find('\0')));
    if (text.size() != name.size() || text.size() >= kNameBytes) {
        const std::uint64_t hash = hash_of(name);
        const std::string end = "~" + digits(hash ^ hash >> 32);
        std::size_t length = std::min(text.size(), kNameBytes - 1 - end.size());
        // A UTF-8 character is not cut in two: its bytes after the first are 10xxxxxx.
        while (length < text.size() && length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80)
            --length;
        text = text.substr(0, length) + end;
    }
    std::memcpy(header.name, text.c_str(), text.size() + 1);
}

std::string quoted_name(const Header& header) {
    const std::string name = text_of(header.name);
    return name.empty() ? "" : " '" + name + "'";
}

std::string tensor_text(const Header& header) {
    std::string text = to_string(header.dtype);
    if (header.tensors != 1)
        return text + " " + std::to_string(header.tensors) + " tensors, " + std::to_string(header.count) + " elements";
    for (int i = 0; i < std::min<int>(header.dims, kMaxDims); ++i)
        text += (i ? ", " : " [") + std::to_string(header.shape[i]);
    return text + (header.dims == 0 ? " []" : "]");
}

std::string title(const Header& header) { return to_string(header.kind) + quoted_name(header); }

std::string describe(const Header& header) {
    if (header.sequence == 0) return title(header);  // it ended before it began
    return title(header) + " (sequence " + std::to_string(header.sequence) + ")";
}

}  // namespace ring
