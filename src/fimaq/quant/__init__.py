"""Quantizers, quantized layers and bit packing."""
