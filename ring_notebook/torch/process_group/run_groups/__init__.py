"""The groups of torch.distributed in a run, of any backend: made, watched while ranks wait in them, and ended."""
