"""What ranks print and display, as the panel and the report show it."""
