"""What runs: graphs of ONNX Runtime, OpenVINO and torch, by provider."""
