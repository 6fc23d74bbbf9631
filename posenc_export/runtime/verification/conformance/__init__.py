"""Contracts of kernels: the documented arithmetic of operators, in float64 (docs/reliability.md).

A contract is the geometry of an operator (`trial.py`). `attention.py` and `operators.py` have the
calls and the arithmetic of each operator. `geometry.py` reads the contracts of a graph. `suite.py`
tries them, or those that `posenc conformance` tries without a graph, and keeps results.
"""
