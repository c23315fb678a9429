"""How the ranks of a job find each other: by MPI or by our own rendezvous, over sockets that they inherit."""
