"""CUDA sources to running kernels: compile with NVRTC, keep the cubins, launch on torch's stream.

The one place that knows NVRTC, CuPy and the driver. A machine with neither GPU nor driver can
compile all the same, which is how the kernels are checked without a GPU.
"""
