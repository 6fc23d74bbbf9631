"""What runs: graphs of ONNX Runtime and torch, by provider."""
