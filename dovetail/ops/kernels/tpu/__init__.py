"""Kernels for TPUs, ours and upstream's."""
