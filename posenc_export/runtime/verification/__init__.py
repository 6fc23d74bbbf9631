"""What proves an artefact (docs/reliability.md). checks.py lists the checks that need it alone.

1. Numbers: `constants.py` finds and decodes the numbers that a graph stores, and `checks.py`
   compares their digests with those of the export.
2. Indices: `symbolic.py` translates the part of a graph that `integer_graph.py` cuts out for a
   solver, which it asks, and `operators.py` its operators. `claims.py` proves what the manifest
   declares of it for the calls of `any_call.py`. `checks.py` also compares rows of attention
   kernels. `torch_graph.py` reads a torch.export program as nodes of ONNX.
3. Graph: `measuring.py` runs the cells of the grid, and compares them with the outputs that
   `proof.py` reads; of an artefact that rounds, first the form that `float32_form.py` writes.
4. Kernels: `conformance/geometry.py` finds the operators of a graph that have a contract, and
   `conformance/suite.py` tries the kernels of this machine alone, unless one is known to be right.

`proof.py` has the tolerances, too, and the certificate. What rounding costs on text is measured by
the export.
"""
