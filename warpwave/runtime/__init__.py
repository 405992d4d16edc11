"""The launch path of a kernel: launches, the CUDA driver, graphs, tensor maps, scratch memory."""
