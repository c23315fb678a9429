"""One execution of a cell on the ranks, and the runs before it."""
