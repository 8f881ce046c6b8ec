"""Kernels for Hopper in Pallas's Mosaic GPU dialect, with the signatures of those for Triton one folder above."""
