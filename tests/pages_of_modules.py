"""The modules of README.md and docs/own-model.md, as they stand there."""

import functools
import re
from pathlib import Path
from typing import Any

import torch

from posenc_export.export import ReadAs, Sources

TOP = Path(__file__).parents[1]
PAGES = {"README": "README.md", "docs": "docs/own-model.md"}  # by the name of a case
CODE = r"^import torch\n+(?:from [^\n]*\n)*\n*class GPT.*?(?=^\S+ = |^def )"
PROMPT, COUNT = [5, 7, 9], 12


@functools.cache
def sources(page: str) -> Sources:
    """Return the sources of the module GPT of a page: 100 token ids to logits."""
    text = (TOP / PAGES[page]).read_text(encoding="utf-8")
    code = re.search(CODE, text, re.DOTALL | re.MULTILINE)
    assert code is not None, f"{PAGES[page]} has no class GPT"
    names: dict[str, Any] = {"__name__": page}
    exec(code[0], names)
    torch.manual_seed(3)
    return Sources(names["GPT"]().eval(), how=ReadAs(max_positions=200))
