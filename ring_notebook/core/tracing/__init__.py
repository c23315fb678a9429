"""What happened on this rank: native events as a Chrome trace."""
