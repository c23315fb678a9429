"""Bytes that none of our programs writes."""
