// Writes a thread's native stack on a signal, also while that thread holds the GIL.
#pragma once

namespace ring {

// Adds to what `signum` does now: a thread of the core then writes the native stack of the signalled thread to the file
// `fd`, the innermost call first:
//
//   Native stack (most recent call first):
//     clock_nanosleep of /lib/x86_64-linux-gnu/libc.so.6
//     ? of /usr/lib/libfast.so
//   End of native stack
//
// "?" stands for a function that its library does not export. A process has one handler, so later calls do nothing.
// Throws std::system_error when no thread can be started.
void report_native_stack(int signum, int fd);

}  // namespace ring
