// Threads of the core take no signals.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace ring {

// A thread that is started while it lives takes none. Signals belong to the main thread, where Python handles them; but
// a thread's own crashes are told by that thread.
class NoSignals {
   public:
    NoSignals() {
        sigset_t others;
        sigfillset(&others);
        for (int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&others, crash);
        pthread_sigmask(SIG_SETMASK, &others, &before_);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    NoSignals(const NoSignals&) = delete;
    NoSignals& operator=(const NoSignals&) = delete;

   private:
    sigset_t before_;
};

}  // namespace ring
