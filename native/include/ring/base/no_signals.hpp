// Blocks signals in the threads of the core.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace ring {

// Threads that are started in its lifetime block all signals: Python handles signals in the main thread. The signals of
// a crash stay open, because the thread that crashes must report itself.
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
