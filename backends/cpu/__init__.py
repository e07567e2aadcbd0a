"""The CPU as a device: shareable memory, ordered queues as streams, kernels compiled by the host's C++ compiler."""

from commrt.backends.cpu.backend import CpuBackend

PLUGIN_API = 1
plugin = CpuBackend()
