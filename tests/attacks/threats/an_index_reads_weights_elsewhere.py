"""Read weights by a path of model.safetensors.index.json outside of the folder."""

from tests.attacks.folders import attacks

write = attacks()["model.safetensors.index.json weight_map path"]
