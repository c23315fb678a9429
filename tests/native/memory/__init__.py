"""Ring memory, and what malloc keeps."""
