"""A transport that wraps another and spoils it: delay, drop, reorder, cut. For tests."""

from commrt.transports.fault.transport import FaultTransport

PLUGIN_API = 1
plugin = FaultTransport()
