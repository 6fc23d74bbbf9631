"""Run a command while pytorch_model.bin of a checkpoint is unpickled."""

from tests.attacks.folders import attacks

write = attacks()["pytorch_model.bin with a pickle: command"]
