"""Copy a file of the user, by a link in a checkpoint, into an artefact that is published."""

from tests.attacks.folders import attacks

write = attacks()["tokenizer_config.json as a link out"]
