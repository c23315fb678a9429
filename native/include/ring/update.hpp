// The update rules of optimizers, in place on one shard of parameters: the arithmetic and its order are those of
// torch.optim's single-tensor implementations, in float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ring {

enum class Rule : std::uint8_t { Sgd = 0, Adam = 1 };

struct Update {
    Rule rule = Rule::Sgd;
    bool maximize = false;
    bool nesterov = false;
    bool first = false;      // SGD: the momentum buffer begins as the gradient
    bool decoupled = false;  // AdamW: weight decay shrinks the parameter and not the gradient
    float lr = 0.0F;
    float weight_decay = 0.0F;
    float momentum = 0.0F;
    float dampening = 0.0F;
    float beta1 = 0.0F;
    float beta2 = 0.0F;
    float eps = 0.0F;
    double bias1 = 1.0;       // 1 - beta1^t
    double bias2_root = 1.0;  // sqrt(1 - beta2^t)
};

// `first_state` is SGD's momentum buffer or Adam's first moment, `second_state` Adam's second moment.
using UpdateFn = void (*)(float* parameter, const float* gradient, float* first_state, float* second_state,
                          std::size_t count, const Update& update);

}  // namespace ring
