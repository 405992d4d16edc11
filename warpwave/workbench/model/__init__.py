"""Bounds, predicted times and losses of a call."""
