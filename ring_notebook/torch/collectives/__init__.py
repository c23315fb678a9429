"""The collectives under Horovod's names, one file for each operation."""
