"""Real kernels and clusters."""
