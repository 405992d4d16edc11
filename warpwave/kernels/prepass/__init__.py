"""Kernels that prepare operands: mask bits and lists of steps, scaled and split float32 parts, V transposed, and copies
without what a mask or bias hides."""
