"""Kinds of device, one folder each. Found by name through `commrt.plugins`; never imported by one another."""
