"""Algorithms of gather."""
