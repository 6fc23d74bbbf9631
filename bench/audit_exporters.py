"""Export checkpoints with one exporter, in the environment that has it. Needs nothing of
posenc_export but for "ort", so that any environment can run the file.

    python bench/audit_exporters.py EXPORTER CHECKPOINTS OUTPUT FAMILY...

Prints a line of JSON for each family: {"family", "file", "seconds", "refused", "versions"}.
"""

import importlib.metadata
import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

Export = Callable[[Path, Path], Path]  # writes a checkpoint to a folder, returns its graph
AXES = {0: "batch_size", 1: "sequence_length"}


def of_transformers(checkpoint: Path, output: Path) -> Path:
    """Export with transformers' exporter: prompt and step in one graph with dynamic axes."""
    from transformers import exporters
    from transformers.exporters.utils import decompose_for_generation

    model = loaded(checkpoint)
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),  # ones would drop it
    }
    if generates(checkpoint):  # what export_for_generation does, without a graph for prompts
        stages = decompose_for_generation(model, inputs, multi_token_decode=True)
        model, inputs = stages["decode"]
    config = exporters.OnnxConfig(dynamic=True)
    exporters.OnnxExporter().export(model, inputs, config).save_pretrained(output)
    return output / "model.onnx"


def optimum(checkpoint: Path, output: Path) -> Path:
    """Export with optimum-onnx, as `optimum-cli export onnx` does."""
    from optimum.exporters.onnx import main_export

    main_export(str(checkpoint), str(output), task=task_of(checkpoint), do_validation=False)
    return output / "model.onnx"


def task_of(checkpoint: Path) -> str:
    """Return the task of a checkpoint by its name in optimum."""
    return "text-generation-with-past" if generates(checkpoint) else "feature-extraction"


def optimum_int8(checkpoint: Path, output: Path) -> Path:
    """Export with optimum-onnx, and round weights and activations to 8 bits with its quantizer."""
    from optimum.onnxruntime import ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    optimum(checkpoint, output)
    quantizer = ORTQuantizer.from_pretrained(output, file_name="model.onnx")
    config = AutoQuantizationConfig.avx2(is_static=False, per_channel=True)
    quantizer.quantize(save_dir=output, quantization_config=config)
    return output / "model_quantized.onnx"


def genai(
    checkpoint: Path, output: Path, precision: str = "fp32", device: str = "cpu", *options: str
) -> Path:
    """Build with the model builder of onnxruntime-genai. options: KEY=VALUE."""
    from onnxruntime_genai.models import builder

    cache = str(output / "cache")
    place = (str(checkpoint), str(output), precision, device, cache)
    read = builder.parse_extra_options(None, *place, [*options])
    builder.create_model(None, *place, **read)
    return output / "model.onnx"


class Wrapper(torch.nn.Module):
    """A decoder with its caches as plain tensors, as people write it for torch.onnx."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return logits, and keys and values of each layer if there are caches."""
        import transformers

        cache = transformers.DynamicCache() if past else None
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= {"position_ids": position_ids, "past_key_values": cache}
        outputs = self.model(**inputs, use_cache=bool(past))
        layers = cache.layers if past else ()
        return (outputs.logits, *(part for layer in layers for part in (layer.keys, layer.values)))


class Encoder(torch.nn.Module):
    """An encoder that returns its last hidden states."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return hidden states [B,S,E]."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        hidden: torch.Tensor = outputs.last_hidden_state
        return hidden


def traced(checkpoint: Path, output: Path, dynamo: bool) -> Path:
    """Export a plain wrapper of the model with torch.onnx.export, through TorchScript unless
    `dynamo`.
    """
    model, file = loaded(checkpoint), output / "model.onnx"
    if generates(checkpoint):
        return export_decoder(Wrapper(model), file, caches_of(model), dynamo)
    inputs = (torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.ones(2, 3, dtype=torch.int64))
    shapes = {"input_ids": AXES, "attention_mask": AXES}
    return _export(Encoder(model), file, inputs, shapes, ["last_hidden_state"], dynamo)


def caches_of(model: Any) -> list[torch.Tensor]:
    """Return keys and values of each layer for two rows of three tokens."""
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7], [8, 9, 10]]), use_cache=True).past_key_values
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def export_decoder(
    wrapper: torch.nn.Module, file: Path, past: Sequence[torch.Tensor], dynamo: bool
) -> Path:
    """Export a wrapper with the names of optimum, traced with two new tokens behind caches."""
    cached = past[0].shape[2] if past else 0
    positions = torch.arange(cached, cached + 2).expand(2, 2).clone()
    mask = torch.ones(2, cached + 2, dtype=torch.int64)
    inputs = (torch.tensor([[11, 12], [13, 14]]), mask, positions, *past)
    parts = [f"{layer}.{part}" for layer in range(len(past) // 2) for part in ("key", "value")]
    shapes = {"input_ids": AXES, "attention_mask": {0: "batch_size", 1: "total_length"}}
    shapes |= {"position_ids": AXES}
    shapes |= {f"past_key_values.{part}": {0: "batch_size", 2: "past_length"} for part in parts}
    outputs = ["logits", *(f"present.{part}" for part in parts)]
    return _export(wrapper, file, inputs, shapes, outputs, dynamo)


def _export(
    wrapper: torch.nn.Module,
    file: Path,
    inputs: tuple[torch.Tensor, ...],
    shapes: dict[str, dict[int, str]],
    outputs: list[str],
    dynamo: bool,
) -> Path:
    """Export with torch.onnx; shapes has the open axes of each input by its name."""
    dims = torch.export.Dim.DYNAMIC
    dynamic = tuple(dict.fromkeys(shape, dims) for shape in shapes.values())
    nested = (*dynamic[:3], dynamic[3:]) if len(dynamic) > 3 else dynamic
    how: dict[str, Any] = {"dynamic_shapes": nested} if dynamo else {"dynamic_axes": shapes}
    how |= {"input_names": [*shapes], "output_names": outputs, "dynamo": dynamo}
    torch.onnx.export(wrapper, inputs, str(file), **how)
    return file


def ours(checkpoint: Path, output: Path) -> Path:
    """Export with posenc_export for the target ort."""
    from posenc_export import export_model, from_pretrained

    export_model(from_pretrained(checkpoint), "ort", output / "artefact", verify=False)
    return output / "artefact" / "model.onnx"


def generates(checkpoint: Path) -> bool:
    """Return whether the checkpoint is a decoder."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return "CausalLM" in config["architectures"][0] or "LMHead" in config["architectures"][0]


def loaded(checkpoint: Path) -> Any:
    """Return transformers' model of a checkpoint."""
    import transformers

    kind = transformers.AutoModelForCausalLM if generates(checkpoint) else transformers.AutoModel
    return kind.from_pretrained(checkpoint, dtype=torch.float32).eval()


GENAI = ("onnxruntime-genai", "transformers")
# Exports by name, with the packages that they need.
EXPORTERS: dict[str, tuple[Export, tuple[str, ...]]] = {
    "transformers": (of_transformers, ("transformers", "onnxscript")),
    "optimum": (optimum, ("optimum-onnx", "transformers")),
    "optimum-int8": (optimum_int8, ("optimum-onnx", "transformers")),
    "genai": (genai, GENAI),
    "genai-int4": (partial(genai, precision="int4"), GENAI),
    "genai-fp16": (partial(genai, precision="fp16", device="cuda"), GENAI),
    "torch-dynamo": (partial(traced, dynamo=True), ("torch", "transformers", "onnxscript")),
    "torchscript": (partial(traced, dynamo=False), ("torch", "transformers")),
    "ort": (ours, ("posenc-export",)),
}  # fmt: skip


def main(name: str, checkpoints: Path, output: Path, families: Any) -> None:
    """Export each family and print its row."""
    export, packages = EXPORTERS[name]
    versions = {package: importlib.metadata.version(package) for package in ("torch", *packages)}
    for family in families:
        folder, begin, row = output / family, time.time(), {"family": family, "versions": versions}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row["file"] = str(export(checkpoints / family, folder))
        except Exception as error:  # a refusal is a result: the row says what it was
            row["refused"] = f"{type(error).__name__}: {error}".strip()
        row["seconds"] = round(time.time() - begin, 1)
        print("\n" + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
