"""Carriers of whole collectives. Found by name through `commrt.plugins`."""
