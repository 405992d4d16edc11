"""The launch path of a kernel: launches, the CUDA driver, tensor maps, scratch memory."""
