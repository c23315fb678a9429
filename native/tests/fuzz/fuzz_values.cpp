// Values that are parsed from bytes: enums, headers, and the news of a round; and numbers as bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "ring/communicator/fusion.hpp"
#include "ring/group/block.hpp"
#include "ring/group/header_damage.hpp"
#include "ring/group/mismatch.hpp"
#include "ring/group/names.hpp"
#include "ring/group/recorder.hpp"
#include "ring/kernels/kernels.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

constexpr std::size_t kInline = 16 << 10;

template <class Value>
void every_number_has_a_text() {
    for (int number = 0; number < 256; ++number)
        expect(std::strlen(to_string(static_cast<Value>(number))) > 0, "a number has no text");
}

Header some_header(Dice& dice) {
    Header header;
    header.sequence = dice() % 100;
    header.kind = static_cast<OpKind>(dice() % kValues<OpKind>);
    header.dtype = static_cast<DType>(dice() % kValues<DType>);
    header.op = static_cast<ReduceOp>(dice() % kValues<ReduceOp>);
    header.dims = static_cast<std::uint8_t>(dice() % (kMaxDims + 1));
    for (int i = 0; i < header.dims; ++i) header.shape[i] = static_cast<std::int64_t>(dice() % 9);
    header.count = dice() % 4000;
    set_name(header, std::string(dice() % 100, 'n'));
    return header;
}

// Half of the time a valid header with a few damaged bytes, else random bytes.
Header damaged_header(Dice& dice) {
    Header header = some_header(dice);
    std::byte raw[sizeof header];
    std::memcpy(raw, &header, sizeof raw);
    const std::size_t times = dice() % 2 == 0 ? dice() % 4 : sizeof raw;
    for (std::size_t i = 0; i < times; ++i) damage_one(dice, raw, sizeof raw);
    std::memcpy(&header, raw, sizeof raw);
    return header;
}

void headers(Dice& dice) {
    std::vector<Header> all;
    for (int i = 0; i < 3; ++i) all.push_back(damaged_header(dice));
    for (const Header& one : all) {
        describe(one);
        describe_fully(one);
    }
    const std::vector<int> ranks{4, 5, 6};
    if (!fails<Error>([&] { check_headers(all, ranks, kInline); })) find_mismatch(all, ranks, 1);
}

void news(Dice& dice) {
    NameTable table(2);
    std::vector<Ready> ready;
    for (std::size_t member = 0; member < 2; ++member) {
        News said{dice() % 3, dice() % 2, dice(), {}};
        for (std::size_t i = dice() % 4; i > 0; --i) said.posts.push_back({damaged_header(dice), dice() % 2, 0});
        std::vector<std::byte> data = said.encode();
        for (std::size_t i = dice() % 3; i > 0; --i) damage_one(dice, data.data(), data.size());
        if (dice() % 4 == 0) data.resize(dice() % (data.size() + 100));
        // A copy of exactly this length, so that a sanitizer reports a read beyond its end.
        const std::vector<std::byte> come(data.begin(), data.end());
        try {
            table.add(member, News::decode(come.data(), come.size()));
        } catch (const Error&) {
            return;
        }
    }
    ready = table.take_ready();
    plan_fusion(ready, {0, 1}, dice());
}

// Any bits as numbers, and as what was left; any bytes as packed ones. All in memory of exactly their length.
void packed_numbers(Dice& dice) {
    const std::size_t count = dice() % (3 * Bytes::kBlock);
    const bool any_bits = dice() % 2 == 0;
    const std::size_t shift = dice() % 4;  // floats of Python lie where it likes, bytes anywhere
    std::vector<float> values(count), left(count), now_left(count), got(count);
    for (std::vector<float>* numbers : {&values, &left})
        for (float& one : *numbers) {
            const auto bits = static_cast<std::uint32_t>(dice());
            if (any_bits)
                std::memcpy(&one, &bits, sizeof one);
            else
                one = std::ldexp(static_cast<float>(bits) - 2e9f, static_cast<int>(dice() % 40) - 60);
        }
    std::vector<std::byte> bytes(shift + Bytes::size(count));
    const bool adds = dice() % 2 == 0;
    kernels().pack(bytes.data() + shift, values.data(), adds ? left.data() : nullptr, now_left.data(), count);
    kernels().unpack(got.data(), bytes.data() + shift, count, false);
    for (std::size_t begin = 0; begin < count; begin += Bytes::kBlock) {
        const std::size_t end = std::min(count, begin + Bytes::kBlock);
        double most = 0;
        bool finite = true;
        for (std::size_t i = begin; i < end; ++i) {
            const float whole = adds ? values[i] + left[i] : values[i];
            finite = finite && std::isfinite(whole);
            most = std::max(most, std::fabs(static_cast<double>(whole)));
        }
        for (std::size_t i = begin; i < end; ++i) {
            expect(std::isfinite(got[i]) == finite, "a block is NaN where all of its numbers are finite, or not");
            if (!finite) continue;
            const double whole = adds ? values[i] + left[i] : values[i];
            expect(std::fabs(got[i] - whole) <= std::max(most / 127, 1.2e-38) * 0.501, "rounded too far");
            expect(std::fabs(whole - got[i] - now_left[i]) <= most * 1e-6, "not what rounding has left");
        }
    }
    for (std::byte& one : bytes) one = static_cast<std::byte>(dice());
    kernels().unpack(got.data(), bytes.data() + shift, count, true);
}

}  // namespace

void damage_one(Dice& dice, std::byte* data, std::size_t bytes) {
    if (bytes == 0) return;
    std::byte& one = data[dice() % bytes];
    switch (dice() % 3) {
        case 0:
            one = static_cast<std::byte>(dice());
            break;
        case 1:
            one ^= static_cast<std::byte>(1u << dice() % 8);
            break;
        default:
            one = dice() % 2 == 0 ? std::byte{0} : std::byte{0xff};
    }
}

void fuzz_values(Dice& dice, double seconds) {
    every_number_has_a_text<DType>();
    every_number_has_a_text<Device>();
    every_number_has_a_text<ReduceOp>();
    every_number_has_a_text<OpKind>();
    every_number_has_a_text<RankState>();
    const auto elapsed = stopwatch();
    do {
        headers(dice);
        news(dice);
        packed_numbers(dice);
    } while (elapsed() < seconds);
}

}  // namespace ring::test
