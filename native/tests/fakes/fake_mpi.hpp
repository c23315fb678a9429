// The functions of an MPI that a link calls, in this program, so that a test can choose when a message arrives.
#pragma once

namespace ring::test::fake_mpi {

// A large message begins to arrive for every posted receive: none of them can be cancelled any more.
void match();
// The rest of the messages arrives.
void deliver();

}  // namespace ring::test::fake_mpi
