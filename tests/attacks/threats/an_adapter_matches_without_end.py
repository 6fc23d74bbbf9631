"""Match names of layers with a pattern of exponential time in alpha_pattern."""

from tests.attacks.folders import attacks

write = attacks()["adapter_config.json alpha_pattern pattern"]
