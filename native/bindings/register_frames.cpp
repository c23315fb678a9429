// The frames of a running thread, for another thread that reports where it is.
//
// Each function is one call without Python code or garbage collection: during these the thread may continue. Python
// 3.11 makes a frame object on request; after a collection the function may have returned, and a read of its frame
// crashes.
#include "register.hpp"

namespace py = pybind11;

namespace {

class WithoutCollector {
   public:
    WithoutCollector() : collects_(PyGC_Disable() == 1) {}
    ~WithoutCollector() {
        if (collects_) PyGC_Enable();
    }
    WithoutCollector(const WithoutCollector&) = delete;
    WithoutCollector& operator=(const WithoutCollector&) = delete;

   private:
    bool collects_;
};

py::list frames_of_thread(const py::int_& thread) {
    const WithoutCollector without;
    py::list frames;
    const py::dict innermost = py::reinterpret_borrow<py::object>(PySys_GetObject("_current_frames"))();
    if (!innermost.contains(thread)) return frames;
    py::object frame = innermost[thread];
    while (frame) {
        frames.append(frame);
        auto* caller = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()));
        frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(caller));
    }
    return frames;
}

py::object locals_of_frame(const py::object& frame) {
    const WithoutCollector without;
    return frame.attr("f_locals");
}

}  // namespace

void register_frames(py::module_& module) {
    module.def("frames_of_thread", &frames_of_thread, py::arg("thread"),
               "The frames of a thread, the innermost first; none for a thread that has ended.");
    module.def("locals_of_frame", &locals_of_frame, py::arg("frame"),
               "The local variables of a frame that another thread may be executing.");
}
