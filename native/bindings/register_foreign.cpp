// Collectives that the runtimes of other frameworks call: Python's `carry_out`, as a C function and as a handler of
// XLA. After Python has carried out an allreduce once, later calls run without Python, because a runtime thread would
// wait for the GIL while the program computes.
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "register.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/small_allreduce.hpp"
#include "ring/foreign/call.hpp"
#include "ring/foreign/xla_ffi.hpp"

namespace py = pybind11;
namespace foreign = ring::foreign;
namespace xla = ring::foreign::xla;

using ring::Communicator;

namespace {

// An allreduce without names to match: what its text says, and where it is carried out.
struct AllreduceOfText {
    std::weak_ptr<Communicator> communicator;
    ring::ReduceOp op;
    double prescale, postscale;
    std::string name;
    bool commits;  // an optimizer step follows
    double timeout;
};

constexpr std::size_t kMostKnown = 4096;
constexpr int kDTypeNumbers = 32;

// What Python has registered. It is never freed, because runtime threads outlive the interpreter.
struct KnownCalls {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<const AllreduceOfText>, std::less<>> calls;   // by their texts
    std::map<std::string, std::array<std::int8_t, kDTypeNumbers>, std::less<>> dtypes;  // by framework and its number
    std::atomic<int> in_flight{0};  // calls in threads to which Python delivers no signals
    std::atomic<std::uint64_t> steps{0};
    std::atomic<bool> interrupted{false};  // SIGINT has come, and the main thread has run no Python since
};

KnownCalls& known_calls() {
    static auto* const all = new KnownCalls();
    return *all;
}

int forget_interrupt(void*) {
    known_calls().interrupted = false;
    return 0;
}

bool in_main_thread() { return static_cast<pid_t>(syscall(SYS_gettid)) == getpid(); }

constexpr const char* kModule = "ring_notebook.api.foreign_calls";
constexpr const char* kInterrupts = "ring_notebook.core.foreign_interrupts";
constexpr const char* kInterrupted = "KeyboardInterrupt";
constexpr const char* kCommit = "optimizer step";  // as in core/step_guard.py
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

// A known allreduce of tensors of one dtype. Its text and the tensors are those of a call.
class DirectAllreduce {
   public:
    py::object interrupt;  // the exception of a signal's handler that has ended it

    // False where Python has to carry out the call.
    bool read(const foreign::Call& call) {
        std::array<std::int8_t, kDTypeNumbers> dtypes;
        {
            const std::lock_guard lock(known_calls().mutex);
            const auto found = known_calls().calls.find(std::string_view(call.spec, call.spec_length));
            const auto numbers = known_calls().dtypes.find(std::string_view(call.framework));
            if (found == known_calls().calls.end() || numbers == known_calls().dtypes.end()) return false;
            known_ = found->second;
            dtypes = numbers->second;
        }
        communicator_ = known_->communicator.lock();
        if (!communicator_ || communicator_->closed()) return false;
        if (call.input_count == 0 || (known_->commits && in_main_thread())) return false;  // signals may come
        for (int i = 0; i < call.input_count; ++i) {
            const int number = call.inputs[i].dtype;
            const int dtype = number >= 0 && number < kDTypeNumbers ? dtypes[static_cast<std::size_t>(number)] : -1;
            if (dtype < 0 || (i > 0 && dtype != static_cast<int>(small_.dtype))) return false;
            small_.dtype = static_cast<ring::DType>(dtype);
        }
        return read_tensors(call);
    }

    void carry_out() {
        std::optional<py::gil_scoped_release> nogil;
        if (PyGILState_Check() != 0) nogil.emplace();
        const InFlight in_flight;
        const ring::Interruption check = signal_check(interrupt);
        if (known_calls().interrupted) end_by_interrupt(check);
        if (!communicator_->allreduce_small(small_, known_->timeout, check, [&] { return site(); })) {
            ring::Request request = small_.request(small_.shape);
            request.site = site();
            communicator_->call(std::move(request), known_->timeout, check);
        }
        if (interrupt) throw PythonSignal{};  // it came when all ranks had done their part
        if (!known_->commits) return;
        if (communicator_->size() > 1) communicator_->commit(kCommit, 0, known_->timeout, check);
        ++known_calls().steps;
    }

   private:
    struct InFlight {
        const bool counts = !in_main_thread();
        InFlight() { known_calls().in_flight += counts; }
        ~InFlight() { known_calls().in_flight -= counts; }
    };

    // Without this a program whose waits are short would never look for signals.
    static void end_by_interrupt(const ring::Interruption& check) {
        if (in_main_thread()) return check();
        const py::gil_scoped_acquire gil;
        py::module_::import(kInterrupts).attr("fail")();  // so that the next operation fails
    }

    bool read_tensors(const foreign::Call& call) {
        small_.op = known_->op;
        small_.prescale = known_->prescale;
        small_.postscale = known_->postscale;
        small_.name = known_->name;
        small_.tensors = call.input_count;
        if (call.input_count == 1) {
            small_.dims = call.inputs[0].dims;
            small_.shape = call.inputs[0].shape;
        } else {
            small_.layout = ring::kNoShapes;
        }
        pieces_.resize(static_cast<std::size_t>(call.input_count));
        for (int i = 0; i < call.input_count; ++i) {
            const foreign::Tensor& input = call.inputs[i];
            std::uint64_t count = 1;
            for (int d = 0; d < input.dims; ++d) count *= static_cast<std::uint64_t>(input.shape[d]);
            void* const output = call.allocate(call.context, i, input.dims, input.shape);
            if (output == nullptr && count > 0) return false;
            pieces_[static_cast<std::size_t>(i)] = {static_cast<const std::byte*>(input.data),
                                                    static_cast<std::byte*>(output), count};
            if (call.input_count > 1) small_.layout = ring::add_shape(small_.layout, input.shape, input.dims);
            small_.count += count;
        }
        small_.pieces = pieces_.data();
        return true;
    }

    // The line of the program's thread; runtime threads have none.
    std::uint32_t site() const {
        if (PyGILState_GetThisThreadState() == nullptr || !communicator_->recorder().log()) return 0;
        const py::gil_scoped_acquire gil;
        return call_site(*communicator_);
    }

    std::shared_ptr<const AllreduceOfText> known_;
    std::shared_ptr<Communicator> communicator_;
    ring::SmallAllreduce small_;
    std::vector<ring::Piece> pieces_;
};

// Has Python note the current exception, or `interrupt` of a signal handler, and returns its text.
std::string noted_error(py::object interrupt) {
    try {
        if (!interrupt) {
            guarded([]() -> PyObject* { throw; });
            interrupt = py::error_already_set().value();
        }
        return py::module_::import(kModule).attr("noted")(interrupt).cast<std::string>();
    } catch (const std::exception& error) {
        return error.what();
    }
}

// A `foreign::CarryOut`.
void carry_out(const foreign::Call* call) {
    DirectAllreduce direct;
    if (Py_IsInitialized() && direct.read(*call)) {
        try {
            direct.carry_out();
        } catch (...) {
            const py::gil_scoped_acquire gil;
            const std::string error = noted_error(std::move(direct.interrupt));
            call->fail(call->context, error.c_str());
        }
        return;
    }
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
    // JAX makes it an ordinary error, so interrupt again. In C: Python code would raise here in the main thread.
    if (state.error.rfind(kInterrupted, 0) == 0) PyErr_SetInterrupt();
    xla::ErrorArguments arguments{sizeof(xla::ErrorArguments), nullptr, state.error.c_str(), xla::kAborted};
    return frame->api->create_error(&arguments);
}

}  // namespace

void register_foreign(py::module_& module) {
    module.def(
        "know_dtypes",
        [](const std::string& framework, const py::dict& dtypes) {
            std::array<std::int8_t, kDTypeNumbers> numbers;
            numbers.fill(-1);
            for (const auto& [number, dtype] : dtypes)
                numbers.at(number.cast<std::size_t>()) = static_cast<std::int8_t>(dtype_argument(dtype.cast<int>()));
            const std::lock_guard lock(known_calls().mutex);
            known_calls().dtypes[framework] = numbers;
        },
        py::arg("framework"), py::arg("dtypes"), "The element types of a framework, by its numbers below 32.");
    module.def(
        "know_allreduce",
        [](const std::string& spec, const std::shared_ptr<Communicator>& communicator, int op, double prescale,
           double postscale, std::string name, bool commits, double timeout) {
            auto known = std::make_shared<const AllreduceOfText>(
                AllreduceOfText{communicator, op_argument(op), prescale, postscale, std::move(name), commits, timeout});
            const std::lock_guard lock(known_calls().mutex);
            if (known_calls().calls.size() >= kMostKnown) known_calls().calls.clear();
            known_calls().calls[spec] = std::move(known);
        },
        py::arg("spec"), py::arg("communicator"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
        py::arg("name"), py::arg("commits"), py::arg("timeout"),
        "Carry out allreduces of this text without Python while the communicator is open.");
    module.def(
        "foreign_calls_in_flight", [] { return known_calls().in_flight.load(); },
        "How many calls of allreduces wait without Python, in threads other than the main thread.");
    module.def(
        "note_interrupt",
        [] {
            known_calls().interrupted = true;
            if (Py_AddPendingCall(&forget_interrupt, nullptr) != 0) known_calls().interrupted = false;
        },
        "SIGINT has come: calls fail until the main thread runs Python again, which handles the signal.");
    module.def(
        "interrupted", [] { return known_calls().interrupted.load(); },
        "Whether SIGINT has come and the main thread has run no Python since.");
    module.def(
        "foreign_steps", [] { return known_calls().steps.load(); },
        "How many of them have committed to an optimizer step.");
    module.def(
        "carry_out_address", [] { return reinterpret_cast<std::uintptr_t>(&carry_out); },
        "Address of the C function (foreign/call.hpp) with which a plugin calls a collective.");
    module.def(
        "xla_handler", [] { return py::capsule(reinterpret_cast<void*>(&xla_handler)); },
        "The handler of XLA's foreign function interface that carries out the collective of its attribute `spec`.");
}
