"""NVIDIA GPUs, through cuda-python. Nothing of it is imported before a device is asked for."""

from commrt.backends.cuda.backend import CudaBackend

PLUGIN_API = 1
plugin = CudaBackend()
