"""`warpwave demo`: a sentence encoder with warpwave's attention and with torch's."""
