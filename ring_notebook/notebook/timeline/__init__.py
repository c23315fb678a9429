"""A recorded run: read, summed up, explained, drawn."""
