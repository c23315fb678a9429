"""What stands for GPUs."""
