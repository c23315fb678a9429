"""Horovod's names for what this package has: ``import horovod`` in scripts and libraries that nobody changes."""
