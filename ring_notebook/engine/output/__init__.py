"""What a rank prints, displays and draws, on its way to the notebook."""
