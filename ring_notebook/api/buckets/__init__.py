"""Buckets of gradients: which gradients are reduced together, and how the ranks agree on it."""
