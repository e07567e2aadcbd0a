"""Algorithms of scatter."""
