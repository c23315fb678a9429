"""What a user types."""
