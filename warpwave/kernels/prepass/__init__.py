"""Kernels that prepare operands before a forward: mask bits, scaled and split float32 parts, V transposed."""
