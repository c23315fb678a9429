"""What a user sees of a run, and what ranks ask."""
