"""Greedy decoding with optimum-onnx of an artefact with signature mask, target onnx or ort.

pip install optimum-onnx[onnxruntime]
python generate_optimum.py FOLDER 16 100 101 102   # 16 tokens after a prompt of three
"""

import sys

import torch
from optimum.onnxruntime import ORTModelForCausalLM


def main(folder, count, *prompt):
    model = ORTModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[int(token) for token in prompt]])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=int(count), do_sample=False
    )
    print(*made[0, len(prompt) :].tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
