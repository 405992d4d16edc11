"""How a kernel starts: launches, the CUDA driver, graphs, tensor maps, scratch memory."""
