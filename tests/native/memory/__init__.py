"""Ring memory and the allocator."""
