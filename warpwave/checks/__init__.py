"""Checks of what a caller passes: the arguments of a call, the tensor for its output, and a stated problem."""
