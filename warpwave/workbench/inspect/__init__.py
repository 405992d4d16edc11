"""`warpwave inspect`: what a kernel compiles to."""
