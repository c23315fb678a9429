"""Ranks on other hosts: an agent there starts them, and talks to the supervisor over the streams of ssh or srun."""
