"""TCP between hosts, and between containers of one: authenticated connections with a native data path."""

from commrt.transports.tcp.transport import TcpTransport

PLUGIN_API = 1
plugin = TcpTransport()
