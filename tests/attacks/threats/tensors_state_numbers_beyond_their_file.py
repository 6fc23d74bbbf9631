"""Read beyond the memory of a safetensors file by the sizes that it states."""

from tests.attacks.folders import attacks

write = attacks()["safetensors of more than 64 bits"]
