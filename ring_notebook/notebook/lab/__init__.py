"""The laboratory: one way to start, follow, judge and branch runs, for programs, and within bounds for agents."""
