// The frames of a thread that runs, for another one that says where it is.
//
// Each function is one call: no Python code and no garbage collection in it. Either may let the thread go on. Python
// 3.11 makes a frame object when it is asked for one; by the end of a collection in between its function may have
// returned, and who looks at the frame then kills the process.
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
