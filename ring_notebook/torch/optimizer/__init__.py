"""DistributedOptimizer and its parts."""
