"""The processes between a launcher and the ranks: they start ranks, pass signals on, carry output, report failures."""
