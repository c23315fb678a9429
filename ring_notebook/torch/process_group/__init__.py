"""torch.distributed on the native core: ``backend="ring"``, its stores, and the default group of a run."""
