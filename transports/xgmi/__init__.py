"""AMD GPUs of one host, each process mapping the others' memory by HIP's IPC handles."""

from commrt.device_links import DeviceTransport
from commrt.transport import Reach

PLUGIN_API = 1
plugin = DeviceTransport("xgmi", backend="hip", estimate=Reach(latency_us=1.0, bandwidth_gbps=45.0))  # a guess
