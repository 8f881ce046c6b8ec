"""Calibrated quantisation: weights are rounded so that the outputs of layers change least on given texts."""
