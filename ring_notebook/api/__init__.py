"""Rank side, floor 2: what the faces of all frameworks share; imports no framework."""
