"""Algorithms of send."""
