"""Kernels for NVIDIA GPUs, in Pallas (Triton) and through cuDNN."""
