"""What a rank and what starts it share: its environment, its status, its rendezvous and its allocator."""
