"""Allocate 2^60 numbers that the metadata of a GGUF file state."""

from tests.attacks.folders import attacks

write = attacks()["gguf with a long array"]
