"""Shared memory between processes of one host, and `process_vm_readv` for memory that isn't shared."""

from commrt.transports.shm.transport import ShmTransport

PLUGIN_API = 1
plugin = ShmTransport()
