"""Time of ONNX Runtime's products of activations and constant weights alone, by number of tokens: a lower bound of what several rows or drafted tokens cost.

    python -m bench.product_kernels [--rounds 9] [--no-write]

Each graph has only one kind of product, repeated with weights of its own until they take MEGABYTES, because the weights of a model do not stay in the processor's
caches either. Processor time of one thread; formats and numbers of tokens take turns. Writes bench/results/product_kernels.json and the table of docs/beyond.md.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import onnxruntime
from onnx import NodeProto, TensorProto, helper, numpy_helper

from bench import marked
from posenc_export.shared import json_rows

TOKENS = (1, 2, 4, 8, 16, 32)
SIZES = ((576, 576), (576, 1536), (1536, 576))  # inputs and outputs of the products of SmolLM2-135M
MEGABYTES = 48
Bits = Tuple[int, int, bool, int]  # bits, block, zero points, accuracy_level
FORMATS: Dict[str, Optional[Bits]] = {
    "float32": None,
    "int8 (MatMulIntegerToFloat)": None,
    "4 bits, block 32": (4, 32, False, 4),
    "4 bits, block 32, zero points": (4, 32, True, 4),
    "4 bits, block 128": (4, 128, False, 4),
    "4 bits, block 128, zero points": (4, 128, True, 4),
    "4 bits, block 32, float32 activations": (4, 32, False, 0),
    "8 bits, block 32": (8, 32, False, 4),
    "8 bits, block 128": (8, 128, False, 4),
}
RESULTS, PAGE = (
    Path(__file__).parent / "results" / "product_kernels.json",
    Path(__file__).parents[1] / "docs" / "beyond.md",
)


def weights(
    name: str, inputs: int, outputs: int, random: np.random.Generator
) -> Dict[str, np.ndarray]:
    """Return the constants of one product by name, in the order of its inputs."""
    bits = FORMATS[name]
    if name == "float32":
        return {"weight": random.standard_normal((inputs, outputs), dtype=np.float32)}
    if bits is None:
        codes = random.integers(-127, 128, (inputs, outputs), np.int8)
        return {
            "weight": codes,
            "x_scale": np.array(1, np.float32),
            "scale": np.full(outputs, 0.01, np.float32),
            "x_zero": np.array(128, np.uint8),
        }
    blocks, size = -(-inputs // bits[1]), bits[1] * bits[0] // 8
    made = {
        "weight": random.integers(0, 256, (outputs, blocks, size), np.uint8),
        "scale": np.full((outputs, blocks), 0.01, np.float32),
    }
    return {
        **made,
        **(
            {"zero": random.integers(0, 256, (outputs, -(-blocks * bits[0] // 8)), np.uint8)}
            if bits[2]
            else {}
        ),
    }


def node(name: str, inputs: int, outputs: int, constants: Sequence[str], output: str) -> NodeProto:
    """Return a product of x [S,inputs]."""
    bits = FORMATS[name]
    if name == "float32":
        return helper.make_node("MatMul", ["x", *constants], [output])
    if bits is None:
        weight, x_scale, scale, x_zero = constants
        return helper.make_node(
            "MatMulIntegerToFloat",
            ["x", weight, x_scale, scale, x_zero],
            [output],
            domain="com.microsoft",
        )
    attributes = {
        "K": inputs,
        "N": outputs,
        "bits": bits[0],
        "block_size": bits[1],
        "accuracy_level": bits[3],
    }
    return helper.make_node(
        "MatMulNBits", ["x", *constants], [output], domain="com.microsoft", **attributes
    )


def opened(name: str, inputs: int, outputs: int) -> Tuple[Any, Dict[int, Any], int]:
    """Return a session, its bindings by number of tokens, and its number of products."""
    random, kind = np.random.default_rng(0), np.uint8 if name.startswith("int8") else np.float32
    count = max(
        1,
        round(
            MEGABYTES
            * 1e6
            / sum(value.nbytes for value in weights(name, inputs, outputs, random).values())
        ),
    )
    constants: List[Any] = []
    nodes = []
    for index in range(count):
        made = {
            f"{key}.{index}": value for key, value in weights(name, inputs, outputs, random).items()
        }
        constants += [numpy_helper.from_array(value, key) for key, value in made.items()]
        nodes.append(node(name, inputs, outputs, list(made), f"y.{index}"))
    x = helper.make_tensor_value_info(
        "x", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), ["tokens", inputs]
    )
    ends = [
        helper.make_tensor_value_info(f"y.{index}", TensorProto.FLOAT, None)
        for index in range(count)
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "products", [x], ends, constants), ir_version=10
    )
    del model.opset_import[:]
    model.opset_import.extend(
        [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    bindings = {}
    for tokens in TOKENS:
        bindings[tokens] = binding = session.io_binding()
        given = (
            random.standard_normal((tokens, inputs), dtype=np.float32)
            if kind == np.float32
            else random.integers(0, 256, (tokens, inputs), np.uint8)
        )
        binding.bind_cpu_input("x", given)
        y = onnxruntime.OrtValue.ortvalue_from_shape_and_type([tokens, outputs], np.float32)
        for index in range(count):  # one after the other, so that all may write to one buffer
            binding.bind_ortvalue_output(f"y.{index}", y)
    return session, bindings, count


def measured(inputs: int, outputs: int, rounds: int) -> List[Dict[str, Any]]:
    """Return {"format", "size", "microseconds": of one token, "tokens": {number: time relative to one token}} of each format."""
    every = {name: opened(name, inputs, outputs) for name in FORMATS}
    times: Dict[Tuple[str, int], List[float]] = {
        (name, tokens): [] for name in FORMATS for tokens in TOKENS
    }
    for number in range(rounds + 1):  # the first round warms up
        for (name, tokens), taken in times.items():
            session, bindings, count = every[name]
            start = time.process_time()
            session.run_with_iobinding(bindings[tokens])
            taken += [(time.process_time() - start) / count] if number else []
    found = []
    for name in FORMATS:
        relative = {
            str(tokens): round(
                statistics.median(
                    m / one for m, one in zip(times[name, tokens], times[name, 1], strict=True)
                ),
                2,
            )
            for tokens in TOKENS[1:]
        }
        found.append(
            {
                "format": name,
                "size": f"{inputs} x {outputs}",
                "microseconds": round(statistics.median(times[name, 1]) * 1e6, 1),
                "tokens": relative,
            }
        )
    return found


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        f"| size | weights | one token | {' | '.join(f'{tokens} tokens' for tokens in TOKENS[1:])} |",
        "|---" * (len(TOKENS) + 2) + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row['size']} | {row['format']} | {row['microseconds']} us | {' | '.join(format(value, '.2f') for value in row['tokens'].values())} |"
        )
    return "\n".join(lines) + "\n"


def main(given: Optional[Sequence[str]] = None) -> None:
    """Measure all products and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--no-write", action="store_true", help="print the table, and keep results and page"
    )
    options = parser.parse_args(given)
    rows = [row for size in SIZES for row in measured(*size, options.rounds)]
    print(table(rows))
    if not options.no_write:
        json_rows.write(
            RESULTS, {"rounds": options.rounds, "threads": 1, "megabytes": MEGABYTES, "rows": rows}
        )
        marked.replace(PAGE, "products", table(rows))


if __name__ == "__main__":
    main()
