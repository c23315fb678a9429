#include "ring/transport/link.hpp"

#include "ring/base/errors.hpp"

namespace ring {

int Link::take_number(int limit) {
    const std::lock_guard<std::mutex> lock(numbers_mutex_);
    if (numbers_.size() >= static_cast<std::size_t>(limit))
        throw Error("link: " + std::to_string(limit) + " groups are open already, and the link has tags for no more");
    do {
        last_number_ = (last_number_ + 1) % limit;
    } while (!numbers_.insert(last_number_).second);
    return last_number_;
}

void Link::give_back(int number) {
    const std::lock_guard<std::mutex> lock(numbers_mutex_);
    numbers_.erase(number);
}

}  // namespace ring
