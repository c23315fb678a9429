"""What the kernel and the ranks say to each other."""
