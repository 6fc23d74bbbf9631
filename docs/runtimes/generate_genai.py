"""Greedy decoding with onnxruntime-genai of an artefact with signature mask.

pip install onnxruntime-genai
python generate_genai.py FOLDER 16 100 101 102   # 16 tokens after a prompt of three
"""

import sys

import onnxruntime_genai


def main(folder, count, *prompt):
    model = onnxruntime_genai.Model(folder)
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(
        max_length=len(prompt) + int(count), do_sample=False
    )  # shared caches have max_length slots
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens([int(token) for token in prompt])
    while not generator.is_done():
        generator.generate_next_token()
        print(generator.get_next_tokens()[0], end=" ")
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
