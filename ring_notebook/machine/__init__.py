"""The machine: its cores, GPUs and energy, its processes, and calls of the system with their substitutes."""
