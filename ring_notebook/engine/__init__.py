"""Rank side, floor 3: what runs in an engine, before and during a run."""
