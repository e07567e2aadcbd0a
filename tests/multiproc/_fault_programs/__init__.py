"""Ranks that do what a test tells them, and what becomes of them."""
