"""Contracts of kernels: the documented arithmetic of operators, in float64 (docs/reliability.md).

A contract is the geometry of an operator (`trial.py`). `products.py`, `experts.py`,
`cached_attention.py` and `standard.py` have those of all operators: each writes a graph of one
node with constants, and inputs at the edges. `geometry.py` reads the contracts of a graph,
`suite.py` has those that `posenc conformance` tries without one, and `kept.py` keeps results.
"""
