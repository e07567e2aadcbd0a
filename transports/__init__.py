"""Kinds of link, one folder each. Found by name through `commrt.plugins`; never imported by one another."""
