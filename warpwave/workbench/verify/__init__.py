"""`warpwave verify`: whether this machine computes what it should."""
