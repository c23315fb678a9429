"""How data moves, and which path is chosen."""
