"""What Python sees of the core: tensors, types, events, and the stacks of its threads."""
