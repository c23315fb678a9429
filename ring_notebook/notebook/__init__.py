"""Kernel side: what a notebook shows and does. Never imports core, api, a face or engine."""
