// The update rules of one instruction set; included like kernels_impl.hpp, with the same care.
#pragma once

#include <math.h>
#include <stddef.h>

#include "ring/update.hpp"

namespace {

using ring::Update;

// Every branch is on the update and not on the data, so the compiler moves it out of the loop.
void update_sgd(float* __restrict parameter, const float* __restrict gradient, float* __restrict momentum, float*,
                size_t count, const Update& update) {
    const float sign = update.maximize ? -1.0F : 1.0F;
    const float lr = update.lr, decay = update.weight_decay, keep = update.momentum;
    const float fresh = 1.0F - update.dampening;
    if (keep == 0.0F) {
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
    const float shrink = update.decoupled ? 1.0F - update.lr * update.weight_decay : 1.0F;
    const float decay = update.decoupled ? 0.0F : update.weight_decay;
    const float beta1 = update.beta1, beta2 = update.beta2, eps = update.eps;
    const float step = static_cast<float>(static_cast<double>(update.lr) / update.bias1);
    const float root = static_cast<float>(update.bias2_root);
    for (size_t i = 0; i < count; ++i) {
        const float p = parameter[i] * shrink;
        const float g = sign * gradient[i] + decay * p;
        const float m = mean[i] + (1.0F - beta1) * (g - mean[i]);
        const float v = beta2 * square[i] + (1.0F - beta2) * g * g;
        mean[i] = m;
        square[i] = v;
        parameter[i] = p - step * (m / (sqrtf(v) / root + eps));
    }
}

}  // namespace
