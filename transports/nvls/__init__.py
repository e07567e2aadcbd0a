"""NVLink switches that reduce and broadcast in the memory of all ranks at once: NVIDIA GPUs of one host."""

from commrt.transports.nvls.transport import NvlsTransport

PLUGIN_API = 1
plugin = NvlsTransport()
