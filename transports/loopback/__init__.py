"""All ranks in one process: mapped memory, a port form, an emulated switch and `launch`-coherent memory kind."""

from commrt.transports.loopback.transport import LoopbackTransport

PLUGIN_API = 1
plugin = LoopbackTransport()
