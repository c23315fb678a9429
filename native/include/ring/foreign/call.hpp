// A collective that the runtime of another framework calls, from any of its threads. Plugins that stand outside of the
// core fill these in, so there are C types only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ring::foreign {

struct Tensor {
    void* data;
    int dtype;  // in the numbers of the framework
    int dims;
    const std::int64_t* shape;
};

struct Call {
    const char* framework;  // whose numbers of dtypes these are
    const char* spec;       // which collective, as ring_notebook/api/foreign_calls.py writes it
    std::size_t spec_length;
    const Tensor* inputs;
    int input_count;
    void* context;  // for the two functions below
    // The memory of an output, once its shape is known; null where there is none.
    void* (*allocate)(void* context, int output, int dims, const std::int64_t* shape);
    // Called at most once, with the text of the error.
    void (*fail)(void* context, const char* message);
};

// Returns when the collective has ended.
using CarryOut = void (*)(const Call*);

}  // namespace ring::foreign
