// As much of an MPI as a link calls, in this program, so that a test can choose the moment at which a message comes.
#pragma once

namespace ring::test::fake_mpi {

// A large message has begun to come for every receive that is posted: none of them can be cancelled any more.
void match();
// The rest of it comes.
void deliver();

}  // namespace ring::test::fake_mpi
