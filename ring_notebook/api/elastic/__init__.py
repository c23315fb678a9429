"""Elastic training without a framework: the loop, the base of states, and where commits lie on disk."""
