"""`warpwave explain`: what bounds a call, how far it is from the bound, and what to change."""
