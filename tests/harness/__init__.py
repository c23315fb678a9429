"""What tests need to run real processes: ranks under mpiexec, two hosts, a search for what is left."""
