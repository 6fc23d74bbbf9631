"""GGUF files as checkpoints: config.json, tensors under transformers' names, tokenizer.json."""
