"""`warpwave inspect`: the machine code that a kernel compiles to, and its resources."""
