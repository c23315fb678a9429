"""A CUDA driver, an NCCL and an NVML without a device, as shared libraries that tests compile."""
