"""Ranks that meet, and what happens when they do not."""
