"""The notebooks of the workshop, executed on real clusters."""
