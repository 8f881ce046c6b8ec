"""Kernels for CPUs, NVIDIA GPUs and TPUs, with the signatures of the references in ops."""
