"""Tests of what pip brings, and of environments that lack a part of it."""
