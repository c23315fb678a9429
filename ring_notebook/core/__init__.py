"""Rank side, floor 1: topology, buffers, communicators and metrics. Knows no framework."""
