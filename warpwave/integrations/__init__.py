"""Doors from other libraries to warpwave's calls: one host a file. Importing a door changes nothing in its host."""
