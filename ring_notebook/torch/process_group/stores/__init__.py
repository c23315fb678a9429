"""How the ranks of one run find each other under torch.distributed: the store of keys, and who serves it."""
