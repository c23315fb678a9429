"""Runs: how they end, fail, are stopped, and what stays of them."""
