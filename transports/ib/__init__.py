"""InfiniBand and RoCE, over verbs: libibverbs is looked up at run time, and nothing is built against it."""

from commrt.transports.ib.transport import IbTransport

PLUGIN_API = 1
plugin = IbTransport()
