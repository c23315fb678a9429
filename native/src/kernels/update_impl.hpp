// The update rules of one instruction set; included like kernels_impl.hpp, with the same care.
#pragma once

#include <math.h>
#include <stddef.h>

#include "ring/kernels/update.hpp"

namespace {

using ring::Update;

// Every branch is on the update and not on the data, so the compiler moves it out of the loop.
void update_sgd(float* __restrict parameter, const float* __restrict gradient, float* __restrict momentum, float*,
                size_t count, const Update& update) {
    const float sign = update.maximize ? -1.0F : 1.0F;
    const float lr = static_cast<float>(update.lr), decay = static_cast<float>(update.weight_decay);
    const float keep = static_cast<float>(update.momentum), fresh = static_cast<float>(1.0 - update.dampening);
    if (update.momentum == 0.0) {
        for (size_t i = 0; i < count; ++i) parameter[i] -= lr * (sign * gradient[i] + decay * parameter[i]);
        return;
    }
    const float old = update.first ? 0.0F : keep;
    const float added = update.first ? 1.0F : fresh;
    if (update.nesterov) {
        for (size_t i = 0; i < count; ++i) {
            const float g = sign * gradient[i] + decay * parameter[i];
            const float m = old * momentum[i] + added * g;
            momentum[i] = m;
            parameter[i] -= lr * (g + keep * m);
        }
    } else {
        for (size_t i = 0; i < count; ++i) {
            const float g = sign * gradient[i] + decay * parameter[i];
            const float m = old * momentum[i] + added * g;
            momentum[i] = m;
            parameter[i] -= lr * m;
        }
    }
}

void update_adam(float* __restrict parameter, const float* __restrict gradient, float* __restrict mean,
                 float* __restrict square, size_t count, const Update& update) {
    const float sign = update.maximize ? -1.0F : 1.0F;
    const float shrink = update.decoupled ? static_cast<float>(1.0 - update.lr * update.weight_decay) : 1.0F;
    const float decay = update.decoupled ? 0.0F : static_cast<float>(update.weight_decay);
    const float fresh1 = static_cast<float>(1.0 - update.beta1), fresh2 = static_cast<float>(1.0 - update.beta2);
    const float keep2 = static_cast<float>(update.beta2), eps = static_cast<float>(update.eps);
    const float step = static_cast<float>(update.lr / update.bias1);
    const float root = static_cast<float>(update.bias2_root);
    for (size_t i = 0; i < count; ++i) {
        const float p = parameter[i] * shrink;
        const float g = sign * gradient[i] + decay * p;
        const float m = mean[i] + fresh1 * (g - mean[i]);
        const float v = keep2 * square[i] + fresh2 * g * g;
        mean[i] = m;
        square[i] = v;
        parameter[i] = p - step * m / (sqrtf(v) / root + eps);
    }
}

}  // namespace
