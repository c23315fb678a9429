"""A CUDA driver and an NCCL without a device, as shared libraries that tests compile and the core loads."""
