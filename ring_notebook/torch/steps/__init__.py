"""Optimizer steps that all ranks make or none; ranks whose states have diverged are found and repaired."""
