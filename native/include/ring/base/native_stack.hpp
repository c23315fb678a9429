// Where a thread is in native code, told when a signal asks: also while that thread keeps all others from running
// Python.
#pragma once

namespace ring {

// From now on `signum` does what it does now, and then has a thread of the core write to the file `fd` the calls that
// the signalled thread was in, the innermost first:
//
//   Native stack (most recent call first):
//     clock_nanosleep of /lib/x86_64-linux-gnu/libc.so.6
//     ? of /usr/lib/libfast.so
//   End of native stack
//
// A function that its library does not export is "?". Once for a process, as a handler is: later calls do nothing.
// Throws std::system_error when there is no thread to be had.
void report_native_stack(int signum, int fd);

}  // namespace ring
