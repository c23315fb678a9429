"""Kernel side: what a notebook shows and does. Never imports core, torch or engine."""
