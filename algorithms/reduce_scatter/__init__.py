"""Algorithms of reduce_scatter."""
