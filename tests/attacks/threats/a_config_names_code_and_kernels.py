"""Import the code, and fetch the kernels and the tokenizer, that the files of a checkpoint name."""

import json
from pathlib import Path

from tests.attacks.folders import checkpoint, code

REFUSED = False  # the names change nothing in the computation


def write(folder: Path, trace: Path) -> Path:
    module, repository = {"AutoModelForCausalLM": "evil.Model"}, "org/evil"
    names = dict.fromkeys(("_attn_implementation", "experts_implementation"), repository)
    checkpoint(folder, auto_map=module, _name_or_path=repository, custom_pipelines=module, **names)
    code(folder, trace)
    tokens = {"auto_map": {"AutoTokenizer": ["evil.Model", None]}, "tokenizer_class": "evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": repository}))
    return folder
