"""`warpwave doctor`: what this machine can do."""
