"""Write the logits of the last token of each call that a Python program makes for given tokens.

bench/clients.py runs this file in environments that have the runtime's library but not this
package.

    python clients_probe.py PROGRAM FOLDER PROMPT_LENGTH TOKENS.npy LOGITS.npy
"""

import importlib.util
import sys

import numpy as np

path, folder, prompt, tokens, logits = sys.argv[1:]
spec = importlib.util.spec_from_file_location("program", path)
assert spec is not None and spec.loader is not None
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
x, session, states, cached = np.load(tokens), program.load(folder), program.empty(), 0
outputs = []
for end in range(int(prompt), x.shape[1] + 1):  # the prompt in one call, then single tokens
    output, states = program.call(session, states, x[:, cached:end], cached)
    outputs.append(np.array(output)[:, -1:])
    cached = end
np.save(logits, np.concatenate(outputs, axis=1))
