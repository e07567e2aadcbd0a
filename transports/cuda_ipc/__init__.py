"""NVIDIA GPUs of one host, whose kernels load and store each other's memory: over NVLink, or PCIe."""

from commrt.device_links import DeviceTransport
from commrt.transport import Reach

PLUGIN_API = 1
plugin = DeviceTransport("cuda_ipc", "cuda", Reach(latency_us=1.0, bandwidth_gbps=100.0))
