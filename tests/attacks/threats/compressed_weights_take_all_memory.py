"""Unpack a small pytorch_model.bin to many times its size."""

from tests.attacks.folders import attacks

write = attacks()["pytorch_model.bin with a pickle: compressed"]
