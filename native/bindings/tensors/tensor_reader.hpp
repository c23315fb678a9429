// Tensors of a framework that exchanges them by DLPack's C functions, read without a call into its Python face.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "ring/base/types.hpp"
#include "tensors/dlpack_abi.hpp"

// A tensor that the core can work on where it lies: dense, contiguous, in host memory, of a dtype that it knows.
struct TensorView {
    std::byte* data = nullptr;
    std::uint64_t count = 0;  // elements
    ring::DType dtype = ring::DType::UInt8;
    int dims = 0;
    const std::int64_t* shape = nullptr;  // the tensor's own, valid while nobody changes that
};

class TensorReader {
   public:
    // `types` are those of tensors: a class derived from one of them may mean something else by its memory. `is_neg`
    // tells whether a tensor's values are those in memory with the sign changed. `flat`: tensors of as many elements
    // match, whatever their shapes. Throws InvalidArgument where the first type has no such functions.
    TensorReader(pybind11::tuple types, pybind11::object is_neg, bool flat);
    // False for all that is not such a tensor, with no Python error set.
    bool read(PyObject* tensor, TensorView& view) const;
    bool flat() const { return flat_; }

   private:
    bool is_negative(PyObject* tensor) const;

    int (*read_)(void* object, dlpack::Tensor* out);
    pybind11::tuple types_;
    pybind11::object is_neg_;
    bool flat_;
};
