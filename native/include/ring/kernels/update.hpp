// The update rules of optimizers, in place on one shard of parameters: the arithmetic and its order are those of
// torch.optim's single-tensor implementations, in float32. Options are float64, as in Python, and rounded where torch
// rounds them: 1 - beta2 of a rounded beta2 would be wrong in its fourth digit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ring {

enum class Rule : std::uint8_t { Sgd = 0, Adam = 1 };
constexpr int kRules = 2;

struct Update {
    Rule rule = Rule::Sgd;
    bool maximize = false;
    bool nesterov = false;
    bool first = false;      // SGD: the momentum buffer begins as the gradient
    bool decoupled = false;  // AdamW: weight decay shrinks the parameter and not the gradient
    double lr = 0.0;
    double weight_decay = 0.0;
    double momentum = 0.0;
    double dampening = 0.0;
    double beta1 = 0.0;
    double beta2 = 0.0;
    double eps = 0.0;
    double bias1 = 1.0;       // 1 - beta1^t
    double bias2_root = 1.0;  // sqrt(1 - beta2^t)
};

// `first_state` is SGD's momentum buffer or Adam's first moment, `second_state` Adam's second moment.
// Each may be null where `state_tensors` says that the rule has none.
using UpdateFn = void (*)(float* parameter, const float* gradient, float* first_state, float* second_state,
                          std::size_t count, const Update& update);

// How many state tensors the update reads and writes.
inline int state_tensors(const Update& update) {
    return update.rule == Rule::Adam ? 2 : update.momentum != 0.0 ? 1 : 0;
}

}  // namespace ring
