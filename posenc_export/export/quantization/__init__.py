"""Weights and caches with fewer bits: formats, rounding, calibration data."""
