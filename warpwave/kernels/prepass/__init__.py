"""Kernels that prepare operands: mask bits and lists of steps, scaled and split float32 parts, 8-bit values in float16,
and copies without what a mask or bias hides."""
