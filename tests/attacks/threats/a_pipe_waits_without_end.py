"""Wait without end for a writer of the pipe in the place of config.json."""

from tests.attacks.folders import attacks

write = attacks()["config.json as a pipe"]
