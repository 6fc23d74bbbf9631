"""Graphs of tiny models as torch.onnx exports them, with and without faults of exporters."""

import warnings
from pathlib import Path
from typing import Any, Callable, Optional, Tuple

import torch
import transformers

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
}
# Keys of SIZES that a config has under other names.
OWN_NAMES = {
    "gpt2": ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
             "intermediate_size", "max_position_embeddings"),
    "bloom": ("num_attention_heads", "num_key_value_heads", "num_hidden_layers",
              "intermediate_size", "max_position_embeddings"),
}  # fmt: skip
Model = Any
Fault = Callable[["Wrapped"], None]


def model_of(name: str, seed: int = 1, **more: Any) -> Model:
    """Return a random model of transformers whose attention is far from uniform."""
    kind, changes = MODELS[name]
    torch.manual_seed(seed)
    sizes = {key: size for key, size in SIZES.items() if key not in OWN_NAMES.get(name, ())}
    config = getattr(transformers, kind)(**{**sizes, **changes, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    return model.eval()


class Wrapped(torch.nn.Module):
    """A decoder as graphs of others call it; with a cache if `cached`."""

    def __init__(self, model: Model, cached: bool) -> None:
        super().__init__()
        self.model, self.cached = model, cached

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> Tuple[torch.Tensor, ...]:
        cache = transformers.DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache if self.cached else None,
            use_cache=self.cached,
        )
        if not self.cached:
            return (output.logits,)
        layers = output.past_key_values.layers
        return (output.logits, *(part for layer in layers for part in (layer.keys, layer.values)))


def exported(
    model: Model, path: Path, cached: bool = True, wrapped: Optional[torch.nn.Module] = None
) -> Path:
    """Export a model with torch.onnx and the names of optimum; with the tracer of TorchScript,
    which is faster.
    """
    config, past = model.config, 5 if cached else 0
    head = config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    names = [
        f"past_key_values.{layer}.{part}"
        for layer in range(config.num_hidden_layers if cached else 0)
        for part in ("key", "value")
    ]
    presents = [name.replace("past_key_values", "present") for name in names]
    tokens = torch.randint(3, 61, (2, 3))
    mask, positions = torch.ones(2, past + 3, dtype=torch.int64), torch.arange(past, past + 3)
    inputs = (tokens, mask, positions.expand(2, 3).clone())
    inputs += tuple(torch.randn(2, heads, past, head) for _ in names)
    columns = {
        name: {0: "batch", 1: "sequence"} for name in ("input_ids", "position_ids", "logits")
    }
    axes = {**columns, "attention_mask": {0: "batch", 1: "total"}}
    axes |= {name: {0: "batch", 2: "past"} for name in names}
    axes |= {name: {0: "batch", 2: "total"} for name in presents}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            wrapped or Wrapped(model, cached).eval(),
            inputs,
            str(path),
            dynamo=False,
            input_names=["input_ids", "attention_mask", "position_ids", *names],
            output_names=["logits", *presents],
            dynamic_axes=axes,
        )
    return path
