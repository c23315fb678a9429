"""How an engine starts, and the MPI that it starts with."""
