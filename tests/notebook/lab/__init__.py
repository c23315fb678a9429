"""The laboratory, by its own interface and by agents."""
