// The line of the program that has called an operation: the innermost one outside of this package and of PyTorch.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "register.hpp"
#include "ring/communicator/communicator.hpp"

namespace py = pybind11;

namespace {

// What is known of a function, whose code object is kept for ever so that no other one gets its address.
struct Known {
    bool is_inner = false;               // of this package, or of a library for loops
    std::uint64_t log = 0;               // of the sites
    std::map<int, std::uint32_t> sites;  // by instruction
};

std::string_view text_of(PyObject* value) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text != nullptr) return {text, static_cast<std::size_t>(length)};
    PyErr_Clear();
    return "?";
}

// The folder of this package, with a slash.
const std::string& package() {
    static const auto* const folder = [] {
        const auto file = py::module_::import("ring_notebook").attr("__file__").cast<std::string>();
        return new std::string(file.substr(0, file.rfind('/') + 1));
    }();
    return *folder;
}

// Libraries that call collectives for a loop in the user's code. Trainers are left out: their caller's line is the
// same for every collective.
constexpr std::string_view kForLoops[] = {"-packages/torch/", "-packages/accelerate/", "-packages/lightning/fabric/",
                                          "-packages/lightning_fabric/"};

bool is_inner(std::string_view file) {
    return file.substr(0, package().size()) == package() || file.substr(0, 7) == "<frozen" ||
           std::any_of(std::begin(kForLoops), std::end(kForLoops),
                       [file](std::string_view folder) { return file.find(folder) != file.npos; });
}

Known& known(PyCodeObject* code) {
    static auto* const all = new std::unordered_map<PyCodeObject*, Known>();  // threads may outlive the interpreter
    const auto [at, is_new] = all->try_emplace(code);
    if (is_new) {
        Py_INCREF(code);
        at->second.is_inner = is_inner(text_of(code->co_filename));
    }
    return at->second;
}

int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(frame);
#else
    return PyFrame_GetLineNumber(frame);
#endif
}

}  // namespace

std::uint32_t call_site(const ring::Communicator& communicator) {
    const auto& log = communicator.recorder().log();
    if (!log) return 0;
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    std::uint32_t found = 0;
    while (frame != nullptr) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        Known& function = known(code);
        if (!function.is_inner) {
            if (std::exchange(function.log, log->id()) != log->id()) function.sites.clear();
            std::uint32_t& site = function.sites[instruction_of(frame)];
            if (!log->knows_site(site))
                site = log->add_site(text_of(code->co_filename), text_of(code->co_name),
                                     static_cast<std::uint64_t>(PyFrame_GetLineNumber(frame)));
            found = site;
        }
        Py_DECREF(code);
        PyFrameObject* caller = found != 0 ? nullptr : PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = caller;
    }
    return found;
}
