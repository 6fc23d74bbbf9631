"""Run model.onnx with ONNX Runtime and numpy alone. Written by `posenc inspect FOLDER --runtime python`.

model: decoder for target ort, float32, signature positions
encoding: rope in 5 of 5 layers
sizes: layers 5, width 128, heads 4, kv heads 2, head size 32, vocabulary 256, a step reads 955904 weights
positions: 0 .. 4095
interface: 1

pip install onnxruntime numpy
python decode.py FOLDER 16 100 101 102   # 16 tokens after a prompt of three
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

CAPACITY = 1024  # slots of the caches: the limit of a row's tokens; can be set up to 4096
POSITIONS = 4096  # 0 .. POSITIONS - 1
STOP_IDS = []
VOCABULARY = 256
# For each state: name of the input, name of the output to feed back as that input, dtype, shape and initial value.
STATES = [
    *((f"past_key_values.{n}.{part}", f"present.{n}.{part}", "float32", (1, 2, CAPACITY, 32), 0) for n in range(5) for part in ("key", "value")),
]


def load(folder):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")  # subnormal numbers are slow
    options.log_severity_level = 3  # without this, TensorScatter logs in every call that it copies its cache
    return onnxruntime.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])


def empty():
    """Return the states of a row without tokens."""
    return {past: np.full(shape, fill, dtype) for past, _, dtype, shape, fill in STATES}


def call(session, states, x, held):
    """Feed x, new tokens of a row that holds `held` tokens. Return the logits of the last token, and the states for the next call."""
    # The graph counts the tokens of a row, and its outputs depend on distances only: it takes no start.
    new = x.shape[1]
    if new < 1:
        raise ValueError("expected at least one token, got none")
    if held + new > POSITIONS:
        raise ValueError(f"expected positions 0 .. {POSITIONS - 1}, got {held} .. {held + new - 1}")
    if x.min() < 0 or x.max() >= VOCABULARY:
        raise ValueError(f"expected token ids 0 .. {VOCABULARY - 1}, got {x.min()} .. {x.max()}")
    if held + new > CAPACITY:
        raise ValueError(f"expected at most {CAPACITY} tokens in a row (CAPACITY), got {held + new}")
    feeds = {
        "input_ids": x,
        "logits_index": np.array([[new - 1]], np.int64),
        "seqlens_k": np.array([held + new - 1], np.int32),
        "total_sequence_length": np.array(held + new, np.int32),
    }
    output, *present = session.run(["logits", *(name for _, name, *_ in STATES)], {**feeds, **states})
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
