"""Algorithms of broadcast."""
