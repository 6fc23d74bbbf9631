"""Outputs of the eager module for a proof, in float32 for artefacts of every dtype."""

from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from posenc_export.export.describe import Model, eager
from posenc_export.export.edges import edges_of, indices_of
from posenc_export.export.read_module import as_model
from posenc_export.export.sources import in_dtype
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs
from posenc_export.runtime.verification.cells import outputs_by
from posenc_export.runtime.verification.proof import Expected
from posenc_export.runtime.verification.scenarios import AttributeCase, Case
from posenc_export.shared.progress import Progress, Steps, silent
from posenc_export.shared.refusal import refusal


def expected_outputs(
    model: Model, manifest: Manifest, long: bool = True, say: Progress = silent
) -> Expected:
    """Return the expected outputs of a model in the artefact's dtype. long: also compute those of
    the long sequence (runtime/verification/grid_inputs.py); say: reports how many tokens are read.
    """
    session = eager_session(model, grid_inputs.length_of(manifest))
    edges = indices_of(edges_of(model), manifest)
    of_case, length = 2 * max(grid_inputs.BATCHES) * grid_inputs.length_of(manifest), 0
    if long:
        length = grid_inputs.length_for(manifest, edges)
    what = f"{manifest.target}: computing the outputs of the module"
    steps = Steps(say, what, len(grid_inputs.starts(manifest)) * of_case + length, "tokens")
    cases, sequence = {}, None
    for start in grid_inputs.starts(manifest):
        cases[start] = _case(session, manifest, start)
        steps.advance(len(cases) * of_case)
    if length:
        whole, before = eager_session(model, length), len(cases) * of_case
        sequence = outputs_by(whole, manifest, edges, lambda read: steps.advance(before + read))
    columns, *of_readout = (np.arange(int(value.axes[-1])) for value in manifest.outputs)
    attributes = _attribute_cases(session, manifest)
    try:
        return Expected(columns, cases, attributes, sequence, *of_readout)
    except ValueError as error:
        raise _cause(model, manifest) or error from None


def _cause(model: Model, manifest: Manifest) -> Optional[ValueError]:
    """Return the error for the first weight of a model, or else the first layer, whose numbers are
    not finite; None if there is none.
    """
    remedy = "correct the weights, and export again"
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            got = f"NaN or infinity in {name} ({str(weight.dtype).removeprefix('torch.')})"
            if weight.dtype == torch.float16:
                got = f"{got}, which holds numbers up to 65504"
                remedy = "export in float32 or bfloat16, or correct the weights"
            return refusal("verify", "finite weights of the module", got, remedy)
    wide, places = in_dtype(model, "float32"), list[str]()
    modules = wide.named_modules()
    hooks = [part.register_forward_hook(partial(_note, places, name)) for name, part in modules]
    _case(eager_session(wide, grid_inputs.length_of(manifest)), manifest, 0)
    for hook in hooks:
        hook.remove()
    got = f"NaN or infinity from {places[0]}" if places else ""
    return refusal("verify", "finite outputs of each layer", got, remedy) if places else None


def _note(places: List[str], name: str, _: Any, inputs: Any, output: Any) -> None:
    """Note the name of a module whose output is not finite; masks are -inf."""
    if isinstance(output, torch.Tensor) and not output.lt(torch.inf).all():
        places.append(name)


def eager_session(model: Model, capacity: Optional[int] = None) -> Session:
    """Return a session that runs the eager model in float32. capacity: as for Model.session. Caches
    are allocated in pages of 2 MiB, so that room for more tokens than are read costs memory.
    """
    module, described = eager(in_dtype(as_model(model), "float32"))
    return Loaded(TorchGraph(module, described)).session(capacity=capacity)


def _case(session: Session, manifest: Manifest, start: int) -> Case:
    tokens, other, fork_at = grid_inputs.case_inputs(manifest)
    sources = grid_inputs.encoder_rows(manifest, len(tokens))
    full, other_full = (full_pass(session, rows, start, sources) for rows in (tokens, other))
    readout = session.read_out(tokens, start=start) if len(manifest.outputs) == 2 else None
    return Case(tokens, full, start, fork_at, other, other_full, sources, readout)


def full_pass(
    session: Session, tokens: np.ndarray, start: int, encoder: Optional[Sequence[np.ndarray]]
) -> np.ndarray:
    """Return the outputs of all tokens in one call of a session that computes in float32."""
    session.reset()
    rows = None if encoder is None else [row.astype(np.float32) for row in encoder]
    chunk = tokens.shape[1]
    return session.prefill(_wide(tokens), start=start, chunk=chunk, encoder=rows)


def _attribute_cases(
    session: Session, manifest: Manifest
) -> Dict[str, Tuple[AttributeCase, np.ndarray]]:
    cases = {}
    for name, fed in grid_inputs.attribute_inputs(manifest).items():
        session.reset()
        how = {key: fed.attributes.get(key) for key in ("grid", "token_types")}
        how |= {"attention_mask": fed.mask, "chunk": fed.tokens.shape[1]}
        cases[name] = fed, session.prefill(_wide(fed.tokens), **how)
    return cases


def _wide(tokens: np.ndarray) -> np.ndarray:
    """Return token ids unchanged, and hidden states in float32."""
    return tokens if tokens.dtype == np.int64 else tokens.astype(np.float32)
