"""Dialogue of a rank with its user: input, pdb over a cell that runs, pdb over one that has failed."""
