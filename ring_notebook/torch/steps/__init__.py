"""Optimizer steps that all ranks make or none, and what finds and mends ranks that have parted."""
