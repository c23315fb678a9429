"""What a rank waits for beside the collectives of this core."""
