"""Dry run of ONNX Runtime's CUDA provider on a machine without a GPU: the shipped library over a
CUDA runtime that does nothing but log (stub/).

It shows whether a graph loads, which provider runs each node, copies between host and device,
errors that the provider reports, launches, and captures of CUDA graphs. It proves no value: kernels
do not run, and outputs are meaningless.
"""
