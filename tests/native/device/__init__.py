"""Tensors on devices, over the fakes of `native.fakes`."""
