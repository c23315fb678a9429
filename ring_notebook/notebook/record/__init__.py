"""What is kept of a run: its log, its files, and how it looks at one moment."""
