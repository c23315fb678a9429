"""What one notebook has, and how its cells come to the ranks. It knows no magic."""
