"""Weights of the trained decoders of posenc-export, one NAME.safetensors for each preset."""

__version__ = "0.1.0"
