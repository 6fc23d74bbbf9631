"""GGUF files as checkpoints: their metadata as config.json, their tensors under transformers'
names, their vocabulary as tokenizer.json.
"""
