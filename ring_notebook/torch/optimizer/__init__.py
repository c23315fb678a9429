"""DistributedOptimizer and what it is made of."""
