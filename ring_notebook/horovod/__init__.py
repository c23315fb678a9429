"""Horovod's names for this package: ``import horovod`` works in unchanged scripts and libraries."""
