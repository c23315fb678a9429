// The ops of TensorFlow, through its C API: declared here and found at run time, so that nothing of TensorFlow is
// needed to compile this, and one library serves all of its versions. RingCall returns when its collective has ended;
// RingCallByName does not occupy a thread of TensorFlow's until then, so that any number of them may wait, in any
// order.
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "ring/foreign/call.hpp"

namespace foreign = ring::foreign;

struct TF_Status;
struct TF_Tensor;
struct TF_OpKernelContext;
struct TF_OpKernelConstruction;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_AsyncOpKernelDoneCallback;

namespace {

using Create = void* (*)(TF_OpKernelConstruction*);
using Compute = void (*)(void*, TF_OpKernelContext*);
using ComputeAsync = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using Delete = void (*)(void*);
using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

struct StringView {  // TF_StringView
    const char* data;
    std::size_t size;
};

#define RING_TF_FUNCTIONS(X)                                                                                 \
    X(TF_NewStatus, TF_Status*, ())                                                                          \
    X(TF_DeleteStatus, void, (TF_Status*))                                                                   \
    X(TF_GetCode, int, (const TF_Status*))                                                                   \
    X(TF_SetStatus, void, (TF_Status*, int, const char*))                                                    \
    X(TF_Message, const char*, (const TF_Status*))                                                           \
    X(TF_NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                     \
    X(TF_OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                           \
    X(TF_OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                          \
    X(TF_OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                         \
    X(TF_OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                            \
    X(TF_OpDefinitionBuilderSetShapeInferenceFunction, void, (TF_OpDefinitionBuilder*, InferShapes))         \
    X(TF_RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                  \
    X(TF_ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))                \
    X(TF_NewKernelBuilder, TF_KernelBuilder*, (const char*, const char*, Create, Compute, Delete))           \
    X(TF_NewAsyncKernelBuilder, TF_KernelBuilder*, (const char*, const char*, Create, ComputeAsync, Delete)) \
    X(TF_RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                          \
    X(TF_RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                                \
    X(TF_OpKernelConstruction_GetAttrSize, void,                                                             \
      (TF_OpKernelConstruction*, const char*, std::int32_t*, std::int32_t*, TF_Status*))                     \
    X(TF_OpKernelConstruction_GetAttrString, void,                                                           \
      (TF_OpKernelConstruction*, const char*, char*, std::size_t, TF_Status*))                               \
    X(TF_OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                         \
    X(TF_OpKernelConstruction_GetName, StringView, (TF_OpKernelConstruction*))                               \
    X(TF_GetFrameId, std::uint64_t, (TF_OpKernelContext*))                                                   \
    X(TF_GetIterId, std::int64_t, (TF_OpKernelContext*))                                                     \
    X(TF_NumInputs, int, (TF_OpKernelContext*))                                                              \
    X(TF_GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                \
    X(TF_ForwardInputOrAllocateOutput, TF_Tensor*,                                                           \
      (TF_OpKernelContext*, const int*, int, int, const std::int64_t*, int, int*, TF_Status*))               \
    X(TF_AllocateOutput, TF_Tensor*,                                                                         \
      (TF_OpKernelContext*, int, int, const std::int64_t*, int, std::size_t, TF_Status*))                    \
    X(TF_ExpectedOutputDataType, int, (TF_OpKernelContext*, int))                                            \
    X(TF_DataTypeSize, std::size_t, (int))                                                                   \
    X(TF_OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                   \
    X(TF_TensorType, int, (const TF_Tensor*))                                                                \
    X(TF_TensorData, void*, (const TF_Tensor*))                                                              \
    X(TF_NumDims, int, (const TF_Tensor*))                                                                   \
    X(TF_Dim, std::int64_t, (const TF_Tensor*, int))                                                         \
    X(TF_DeleteTensor, void, (TF_Tensor*))

#define RING_TF_POINTER(name, result, arguments) result(*name) arguments;
// Functions of TensorFlow. One library is loaded into one process, and TensorFlow's registry of ops is global itself.
struct {
    RING_TF_FUNCTIONS(RING_TF_POINTER)
} tf;
foreign::CarryOut carry_out = nullptr;
std::string trouble;

bool find_functions() {
    void* library = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_LAZY);  // loaded, and found by its name
#define RING_TF_FIND(name, result, arguments)                                                        \
    tf.name = reinterpret_cast<result(*) arguments>(dlsym(library ? library : RTLD_DEFAULT, #name)); \
    if (tf.name == nullptr) {                                                                        \
        trouble = "this TensorFlow has no " #name;                                                   \
        return false;                                                                                \
    }
    RING_TF_FUNCTIONS(RING_TF_FIND)
    return true;
}

// How the text of an error begins, and its code in TensorFlow, as in Horovod. After kAborted some sessions try again.
constexpr std::pair<std::string_view, int> kCodes[] = {{"CollectiveMismatch:", 9 /* failed precondition */},
                                                       {"CollectiveTimeout:", 4 /* deadline exceeded */},
                                                       {"ValueError:", 3 /* invalid argument */},
                                                       {"TypeError:", 3},
                                                       {"NotInitializedError:", 9},
                                                       {"NotImplementedError:", 12 /* unimplemented */},
                                                       {"OutOfRingMemoryError:", 8 /* resource exhausted */}};
constexpr int kAborted = 10;

int code_of(std::string_view error) {
    for (const auto& [beginning, code] : kCodes)
        if (error.substr(0, beginning.size()) == beginning) return code;
    return kAborted;
}

struct DeleteStatus {
    void operator()(TF_Status* status) const { tf.TF_DeleteStatus(status); }
};
using Status = std::unique_ptr<TF_Status, DeleteStatus>;

bool is_ok(const Status& status) { return tf.TF_GetCode(status.get()) == 0; }

struct Kernel {
    std::string spec;
};

void* create_kernel(TF_OpKernelConstruction* construction) {
    const Status status(tf.TF_NewStatus());
    std::int32_t list = 0, size = 0;
    tf.TF_OpKernelConstruction_GetAttrSize(construction, "spec", &list, &size, status.get());
    auto kernel = std::make_unique<Kernel>();
    if (is_ok(status) && size > 0) {
        kernel->spec.resize(static_cast<std::size_t>(size));
        tf.TF_OpKernelConstruction_GetAttrString(construction, "spec", kernel->spec.data(), kernel->spec.size(),
                                                 status.get());
    }
    if (!is_ok(status)) tf.TF_OpKernelConstruction_Failure(construction, status.get());
    if (!kernel->spec.empty() && kernel->spec.back() == '\n') {  // in a function, which may be called several times
        const StringView name = tf.TF_OpKernelConstruction_GetName(construction);
        (kernel->spec += "at ").append(name.data, name.size);
    }
    return kernel.release();
}

void delete_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

struct Execution {
    TF_OpKernelContext* context;
    TF_Status* status;
    int inputs;
};

// The memory of input `output` where nobody else needs that and the shape is the same, else new memory.
void* output_memory(void* context, int output, int dims, const std::int64_t* shape) {
    const auto& execution = *static_cast<Execution*>(context);
    TF_Tensor* tensor = nullptr;
    if (output < execution.inputs) {
        int forwarded = -1;
        tensor = tf.TF_ForwardInputOrAllocateOutput(execution.context, &output, 1, output, shape, dims, &forwarded,
                                                    execution.status);
    } else {
        const int type = tf.TF_ExpectedOutputDataType(execution.context, output);
        std::size_t bytes = tf.TF_DataTypeSize(type);
        for (int d = 0; d < dims; ++d) bytes *= static_cast<std::size_t>(shape[d]);
        tensor = tf.TF_AllocateOutput(execution.context, output, type, shape, dims, bytes, execution.status);
    }
    if (tensor == nullptr) return nullptr;
    void* data = tf.TF_TensorData(tensor);
    tf.TF_DeleteTensor(tensor);  // the context keeps it
    return data;
}

void set_error(void* context, const char* message) {
    tf.TF_SetStatus(static_cast<Execution*>(context)->status, code_of(message), message);
}

void execute(const std::string& spec, TF_OpKernelContext* context) {
    const Status status(tf.TF_NewStatus());
    const int count = tf.TF_NumInputs(context);
    std::vector<foreign::Tensor> inputs;
    std::vector<std::vector<std::int64_t>> shapes(static_cast<std::size_t>(count));
    for (int i = 0; i < count && is_ok(status); ++i) {
        TF_Tensor* tensor = nullptr;
        tf.TF_GetInput(context, i, &tensor, status.get());
        if (!is_ok(status)) break;
        auto& shape = shapes[static_cast<std::size_t>(i)];
        for (int d = 0; d < tf.TF_NumDims(tensor); ++d) shape.push_back(tf.TF_Dim(tensor, d));
        inputs.push_back(
            {tf.TF_TensorData(tensor), tf.TF_TensorType(tensor), static_cast<int>(shape.size()), shape.data()});
        tf.TF_DeleteTensor(
            tensor);  // the context keeps it; another owner would keep its memory from becoming an output
    }
    if (is_ok(status)) {
        Execution execution{context, status.get(), count};
        const foreign::Call call{"tf",  spec.data(), spec.size(),   inputs.data(),
                                 count, &execution,  output_memory, set_error};
        carry_out(&call);
    }
    if (!is_ok(status)) tf.TF_OpKernelContext_Failure(context, status.get());
}

void compute(void* kernel, TF_OpKernelContext* context) { execute(static_cast<Kernel*>(kernel)->spec, context); }

// In a loop, several iterations of one op may wait at a time.
void execute_by_name(const void* kernel, TF_OpKernelContext* context) {
    std::string spec = static_cast<const Kernel*>(kernel)->spec;
    if (const std::uint64_t loop = tf.TF_GetFrameId(context); loop != 0) {
        spec += spec.find('\n') == spec.npos ? "\n" : ", ";
        spec += "iteration " + std::to_string(tf.TF_GetIterId(context)) + " of loop " + std::to_string(loop);
    }
    execute(spec, context);
}

using Done = std::function<void()>;

bool is_code(void* address) {
    Dl_info found;
    return address != nullptr && dladdr(address, &found) != 0;
}

// TensorFlow passes the address of a std::function that is gone when ComputeAsync returns, and exports no copy of it.
// We copy it if its layout is that of our libstdc++: two words of data, then two pointers to code.
bool is_like_ours(TF_AsyncOpKernelDoneCallback* done) {
    const auto& words = *reinterpret_cast<std::array<void*, 4>*>(done);
    return sizeof(Done) == sizeof(words) && is_code(words[2]) && is_code(words[3]);
}

void compute_by_name(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
    if (is_like_ours(done)) {
        auto copy = std::make_unique<Done>(*reinterpret_cast<Done*>(done));
        try {
            std::thread([kernel, context, done = copy.get()] {
                execute_by_name(kernel, context);
                const std::unique_ptr<Done> owner(done);
                tf.TF_RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(done));
            }).detach();
            (void)copy.release();  // to the thread
            return;
        } catch (const std::system_error&) {  // no more threads: this one waits
        }
    }
    execute_by_name(kernel, context);
    tf.TF_RunAsyncOpKernelDoneCallback(done);
}

void unknown_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
    tf.TF_ShapeInferenceContextSetUnknownShape(context, status);  // Python sets those that it knows
}

bool define(const char* name, bool asynchronous) {
    constexpr const char* kTypes = ": list(type) >= 0";  // Python has checked them
    const Status status(tf.TF_NewStatus());
    TF_OpDefinitionBuilder* op = tf.TF_NewOpDefinitionBuilder(name);
    tf.TF_OpDefinitionBuilderAddAttr(op, (std::string("Tin") + kTypes).c_str());
    tf.TF_OpDefinitionBuilderAddAttr(op, (std::string("Tout") + kTypes).c_str());
    tf.TF_OpDefinitionBuilderAddAttr(op, "spec: string");
    tf.TF_OpDefinitionBuilderAddInput(op, "tensors: Tin");
    tf.TF_OpDefinitionBuilderAddOutput(op, "results: Tout");
    tf.TF_OpDefinitionBuilderSetIsStateful(op, true);  // so that a tf.function runs them in the order of its source
    tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, unknown_shapes);
    tf.TF_RegisterOpDefinition(op, status.get());
    if (is_ok(status)) {
        TF_KernelBuilder* kernel =
            asynchronous ? tf.TF_NewAsyncKernelBuilder(name, "CPU", create_kernel, compute_by_name, delete_kernel)
                         : tf.TF_NewKernelBuilder(name, "CPU", create_kernel, compute, delete_kernel);
        tf.TF_RegisterKernelBuilder(name, kernel, status.get());
    }
    if (!is_ok(status)) trouble = tf.TF_Message(status.get());
    return is_ok(status);
}

// TensorFlow makes Python functions of the ops that are registered while it loads a library.
const bool defined = find_functions() && define("RingCall", false) && define("RingCallByName", true);

}  // namespace

// Why there are no ops; empty if there are.
extern "C" __attribute__((visibility("default"))) const char* ring_tensorflow_trouble() { return trouble.c_str(); }

// Gives the ops the function that carries out their collectives; before the first of them runs.
extern "C" __attribute__((visibility("default"))) void ring_tensorflow_connect(foreign::CarryOut function) {
    carry_out = function;
}
