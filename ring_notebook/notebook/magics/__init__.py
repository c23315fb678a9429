"""What a user types: magics, their options and completion, and the state of one notebook."""
