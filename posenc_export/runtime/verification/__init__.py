"""What proves an artefact (docs/reliability.md). checks.py lists the checks that need it alone.

1. Numbers: `constants.py` finds and decodes the numbers that a graph stores, and `checks.py`
   compares their digests with those of the export.
2. Indices: `integer_graph.py` cuts out the part of a graph that computes positions, `symbolic.py`
   and `operators.py` translate it for a solver, and `claims.py` proves what the manifest declares,
   for the calls of `any_call.py`. `checks.py` also compares rows of attention kernels.
   `torch_graph.py` reads a torch.export program as nodes of ONNX.
3. Graph: `measuring.py` runs the cells of the grid, and compares them with the outputs that
   `proof.py` reads. For an artefact that rounds, it first runs the form of `float32_form.py`.
4. Kernels: `conformance/geometry.py` finds the operators of a graph that have a contract, and
   `conformance/suite.py` tries the kernels of this machine alone, unless one is known to be right.

`proof.py` also has the tolerances and the certificate. The export measures what rounding costs on
text.
"""
