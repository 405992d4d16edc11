"""`warpwave demo`: a sentence encoder under our attention and torch's."""
