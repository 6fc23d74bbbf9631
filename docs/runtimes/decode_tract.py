"""Run model.onnx with tract and numpy alone. Written by `posenc inspect FOLDER --runtime tract`.

model: decoder for target onnx, float32, signature positions
encoding: rope in 5 of 5 layers
sizes: layers 5, width 128, heads 4, kv heads 2, head size 32, vocabulary 256, a step reads 955904 weights
positions: 0 .. 4095
interface: 1

pip install tract numpy
python decode.py FOLDER 16 100 101 102   # 16 tokens after a prompt of three
"""

import sys
from pathlib import Path

import numpy as np
import tract

POSITIONS = 4096  # 0 .. POSITIONS - 1
STOP_IDS = []
VOCABULARY = 256
# For each state: name of the input, name of the output to feed back as that input, dtype, shape and initial value.
STATES = [
    ("past_positions", "present_positions", "int64", (1, 0), -1),
    *((f"past_key_values.{n}.{part}", f"present.{n}.{part}", "float32", (1, 2, 0, 32), 0) for n in range(5) for part in ("key", "value")),
]


def load(folder):
    return tract.onnx().load(f"{folder}/model.onnx").into_model().into_runnable()


def empty():
    """Return the states of a row without tokens."""
    return {past: np.full(shape, fill, dtype) for past, _, dtype, shape, fill in STATES}


def call(session, states, x, held, start=0):
    """Feed x, new tokens of a row that holds `held` tokens. Return the logits of the last token, and the states for the next call."""
    new = x.shape[1]
    if new < 1:
        raise ValueError("expected at least one token, got none")
    if start < 0 or start + held + new > POSITIONS:
        raise ValueError(f"expected positions 0 .. {POSITIONS - 1}, got {start + held} .. {start + held + new - 1}")
    if x.min() < 0 or x.max() >= VOCABULARY:
        raise ValueError(f"expected token ids 0 .. {VOCABULARY - 1}, got {x.min()} .. {x.max()}")
    slots = np.arange(held, held + new, dtype=np.int64)[None]
    feeds = {
        "input_ids": x,
        "position_ids": start + slots,
        "logits_index": np.array([[new - 1]], np.int64),
    }
    # Arguments are positional: inputs, then states, in the order of the graph.
    output, *present = (tensor.to_numpy() for tensor in session.run([*feeds.values(), *states.values()]))
    return output, dict(zip(states, present, strict=True))


def generate(session, prompt, count):
    """Return the ids that follow a prompt, by greedy decoding."""
    states, held, tokens, made = empty(), 0, list(prompt), []
    while len(made) < count:
        logits, states = call(session, states, np.array([tokens], np.int64), held)
        held += len(tokens)
        made.append(int(logits[0, -1].argmax()))
        if made[-1] in STOP_IDS:
            break
        tokens = made[-1:]
    return made


def main(folder, count, *prompt):
    print(*generate(load(folder), [int(token) for token in prompt], int(count)))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python decode.py FOLDER COUNT TOKEN...")
    if not Path(sys.argv[1], "model.onnx").exists():
        sys.exit(f"expected a folder with model.onnx, got {sys.argv[1]}")
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
