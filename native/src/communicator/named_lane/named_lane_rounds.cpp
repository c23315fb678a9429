// The rounds of the named lane: what this rank tells the others in one, and what it learns from them.
#include <algorithm>
#include <utility>

#include "ring/communicator/fusion.hpp"
#include "ring/communicator/named_lane.hpp"

namespace ring {
namespace {

// Names that a rank tells in a round: as many as its mailbox holds, so that a round takes one gate.
constexpr std::size_t kMostPosts = 60;
static_assert(kMostPosts * sizeof(Post) < (16 << 10), "RING_INLINE is 16 KiB where nobody sets it");

}  // namespace

bool NamedLane::has_news() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!fresh_.empty()) return true;
    // What others wait for, it must be told.
    if (joins_called_ != told_joins_ && !(own_.empty() && table_.empty())) return true;
    return closing_ && !told_closing_ && !own_.empty();
}

// A rank that has posted more names than another one of a call would wait for them for ever: the others are posted
// where all ranks agree on the first, and thereby on how many there are.
void NamedLane::tell_what_follows() {
    std::vector<std::pair<NameKey, std::shared_ptr<Work>>> failed;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (std::size_t left = following_.size(); left > 0; --left) {
            const NameKey key = std::move(following_.front());
            following_.pop_front();
            const auto own = own_.find(key);
            if (own == own_.end()) continue;  // it has failed meanwhile
            const std::shared_ptr<Work>& work = own->second;
            if (!work->first_->launched()) {
                following_.push_back(key);
            } else if (work->first_->state_.load(std::memory_order_seq_cst) == Work::State::Failed) {
                failed.push_back(*own);
            } else {
                work->first_.reset();
                fresh_.push_back(key);
            }
        }
    }
    for (const auto& [key, work] : failed) finish(key, work, work->first_->error_);
}

NamedLane::Served NamedLane::begin_round() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        News news{joins_called_, 0, owner_.group_->options().fusion_threshold, {}};
        for (; !fresh_.empty() && news.posts.size() < kMostPosts; fresh_.pop_front()) {
            const auto own = own_.find(fresh_.front());
            if (own == own_.end()) continue;  // it has failed meanwhile
            news.posts.push_back({own->second->header_, own->first.hash, own->first.joins});
            show_place(own->second->request_, news.posts.back().header);
        }
        news.closing = closing_ && fresh_.empty() ? 1 : 0;
        told_joins_ = joins_called_;
        told_closing_ = news.closing != 0;
        news_ = news.encode();
        ++counts_.rounds;
    }
    Request request;
    request.kind = OpKind::Allgather;
    request.dtype = DType::UInt8;
    request.pieces = {{news_.data(), nullptr, news_.size()}};
    request.shape = {static_cast<std::int64_t>(news_.size())};
    request.name = "names";
    const bool begins = !inner_->group_->is_called();
    push({inner_->prepare(std::move(request), 0), {}, true});
    const Served served = inner_->serve_queue();
    if (begins) inner_->group_->wake_all();
    return served == Served::Done ? settle() : Served::Moved;
}

// Where one tensor lies now, for what is fused.
void NamedLane::show_place(const Request& request, Header& header) const {
    if (request.pieces.size() != 1 || !in_host_memory(request.device)) return;
    const Piece& piece = request.pieces.front();
    const std::size_t bytes = piece.count * item_size(request.dtype);
    header.input = owner_.domain()->offset_of(piece.input, bytes);
    header.output = owner_.domain()->offset_of(piece.output, bytes);
}

void NamedLane::read_round(const Work& round) {
    std::uint64_t threshold = ~std::uint64_t{0};
    std::vector<Ready> ready;
    std::string hopeless;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::byte* at = round.result_.data.get();
        for (std::size_t member = 0; member < round.result_.counts.size(); ++member) {
            const auto bytes = static_cast<std::size_t>(round.result_.counts[member]);
            const News news = News::decode(at, bytes);
            table_.add(member, news);
            threshold = std::min(threshold, news.threshold);
            at += bytes;
        }
        ready = table_.take_ready();
        std::size_t member = 0;
        if (const Header* header = table_.hopeless(member))
            hopeless = "rank " + std::to_string(owner_.ranks()[member]) +
                       " has left (its cell or script ended) while others wait for it in " + title(*header);
        counts_.names += ready.size();
    }
    for (const auto& operation : plan_fusion(ready, owner_.ranks(), threshold)) {
        std::vector<const Ready*> parts;
        for (std::size_t index : operation) parts.push_back(&ready[index]);
        carry_out(parts);
    }
    if (hopeless.empty()) return;
    owner_.group_->abort(hopeless);
    throw Aborted(owner_.group_->abort_reason());
}

}  // namespace ring
