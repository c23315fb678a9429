// What the C library's malloc does with memory that the program frees. By itself it gives large blocks back to the
// kernel, which has to find and clear new pages for the next tensor. Other C libraries have no such settings; with
// another allocator in the process these functions have no effect.
#pragma once

namespace ring {

// Has malloc keep freed memory for later requests of this process, from now on. False where it cannot.
bool keep_freed_memory() noexcept;
// Gives all freed memory of malloc back to the kernel.
void return_freed_memory() noexcept;

}  // namespace ring
