"""What a rank measures of itself while a cell runs."""
