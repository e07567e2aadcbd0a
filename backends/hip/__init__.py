"""AMD GPUs, through hip-python. Nothing of it is imported before a device is asked for."""

from commrt.backends.hip.backend import HipBackend

PLUGIN_API = 1
plugin = HipBackend()
