"""Algorithms of barrier."""
