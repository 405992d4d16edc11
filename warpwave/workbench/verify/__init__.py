"""`warpwave verify`: checks that this machine computes attention correctly."""
