"""How a kernel starts: launches, the CUDA driver, tensor maps, scratch memory."""
