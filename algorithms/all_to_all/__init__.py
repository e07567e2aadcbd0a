"""Algorithms of all_to_all."""
