"""The collectives under Horovod's names, one file an operation."""
