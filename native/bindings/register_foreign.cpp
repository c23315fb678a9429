// Collectives that the runtimes of other frameworks call: Python's `carry_out`, as a C function and as a handler of
// XLA.
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <vector>

#include "register.hpp"
#include "ring/foreign/call.hpp"
#include "ring/foreign/xla_ffi.hpp"

namespace py = pybind11;
namespace foreign = ring::foreign;
namespace xla = ring::foreign::xla;

namespace {

constexpr const char* kModule = "ring_notebook.api.foreign_calls";
constexpr const char* kInterrupted = "KeyboardInterrupt";
constexpr const char* kEnded = "Python has ended in this process";

py::tuple tuple_of(int dims, const std::int64_t* shape) {
    py::tuple result(static_cast<std::size_t>(dims));
    for (int d = 0; d < dims; ++d) result[static_cast<std::size_t>(d)] = py::int_(shape[d]);
    return result;
}

std::uintptr_t allocate(const foreign::Call& call, int output, const std::vector<std::int64_t>& shape) {
    return reinterpret_cast<std::uintptr_t>(
        call.allocate(call.context, output, static_cast<int>(shape.size()), shape.data()));
}

// The text of the error, or empty.
std::string carried_out(const foreign::Call& call) {
    py::gil_scoped_acquire gil;
    try {
        py::tuple inputs(static_cast<std::size_t>(call.input_count));
        for (int i = 0; i < call.input_count; ++i) {
            const foreign::Tensor& input = call.inputs[i];
            inputs[static_cast<std::size_t>(i)] = py::make_tuple(reinterpret_cast<std::uintptr_t>(input.data),
                                                                 tuple_of(input.dims, input.shape), input.dtype);
        }
        const py::cpp_function memory([&call](int output, const py::tuple& shape) {
            std::vector<std::int64_t> lengths;
            for (const py::handle length : shape) lengths.push_back(length.cast<std::int64_t>());
            return allocate(call, output, lengths);
        });
        return py::module_::import(kModule)
            .attr("carry_out")(call.framework, py::str(call.spec, call.spec_length), inputs, memory)
            .cast<std::string>();
    } catch (const std::exception& error) {
        return error.what();
    }
}

// A `foreign::CarryOut`.
void carry_out(const foreign::Call* call) {
    const std::string error = Py_IsInitialized() ? carried_out(*call) : kEnded;
    if (!error.empty()) call->fail(call->context, error.c_str());
}

struct XlaCall {
    std::vector<const xla::Buffer*> outputs;
    std::string error;
};

void* output_of(void* context, int output, int dims, const std::int64_t* shape) {
    const auto& outputs = static_cast<XlaCall*>(context)->outputs;
    if (static_cast<std::size_t>(output) >= outputs.size()) return nullptr;
    const xla::Buffer& buffer = *outputs[static_cast<std::size_t>(output)];
    bool fits = buffer.rank == dims;
    for (int d = 0; fits && d < dims; ++d) fits = buffer.dims[d] == shape[d];
    return fits ? buffer.data : nullptr;
}

void note_error(void* context, const char* message) { static_cast<XlaCall*>(context)->error = message; }

// XLA's tokens order calls, and have no memory.
template <class Use>
void each_tensor(const xla::Buffers& buffers, Use&& use) {
    for (std::int64_t i = 0; i < buffers.size; ++i)
        if (buffers.buffers[i]->dtype != xla::kTokenType) use(*buffers.buffers[i]);
}

std::string_view spec_of(const xla::Attributes& attributes) {
    for (std::int64_t i = 0; i < attributes.size; ++i) {
        if (attributes.types[i] != xla::kStringAttribute) continue;
        if (std::string_view(attributes.names[i]->data, attributes.names[i]->length) != "spec") continue;
        const auto* text = static_cast<const xla::Text*>(attributes.values[i]);
        return {text->data, text->length};
    }
    return {};
}

// XLA_FFI_Handler: asked first for the version that it was made for, then to execute.
xla::Error* xla_handler(xla::CallFrame* frame) {
    for (xla::Extension* extension = frame->extension; extension != nullptr; extension = extension->next) {
        if (extension->type != xla::kMetadataExtension) continue;
        xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(extension)->metadata;
        metadata.version.major_version = xla::kMajorVersion;
        metadata.version.minor_version = xla::kMinorVersion;
        metadata.traits = 0;
        return nullptr;
    }
    if (frame->stage != xla::kExecuteStage) return nullptr;
    std::vector<foreign::Tensor> inputs;
    each_tensor(frame->inputs, [&](const xla::Buffer& buffer) {
        inputs.push_back({buffer.data, buffer.dtype, static_cast<int>(buffer.rank), buffer.dims});
    });
    XlaCall state;
    each_tensor(frame->outputs, [&](const xla::Buffer& buffer) { state.outputs.push_back(&buffer); });
    const std::string_view spec = spec_of(frame->attributes);
    const foreign::Call call{"xla",  spec.data(), spec.size(), inputs.data(), static_cast<int>(inputs.size()),
                             &state, output_of,   note_error};
    carry_out(&call);
    if (state.error.empty()) return nullptr;
    // JAX makes an ordinary error of it. Not in Python code, which would raise it here if this is the main thread.
    if (state.error.rfind(kInterrupted, 0) == 0) PyErr_SetInterrupt();
    xla::ErrorArguments arguments{sizeof(xla::ErrorArguments), nullptr, state.error.c_str(), xla::kAborted};
    return frame->api->create_error(&arguments);
}

}  // namespace

void register_foreign(py::module_& module) {
    module.def(
        "carry_out_address", [] { return reinterpret_cast<std::uintptr_t>(&carry_out); },
        "Address of the C function (foreign/call.hpp) with which a plugin calls a collective.");
    module.def(
        "xla_handler", [] { return py::capsule(reinterpret_cast<void*>(&xla_handler)); },
        "The handler of XLA's foreign function interface that carries out the collective of its attribute `spec`.");
}
