"""Compare a model with the module that it was built from, for every division into calls."""

from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from posenc_export.export import hypotheses
from posenc_export.export.describe import Model
from posenc_export.export.expected import accuracy_of, eager_session
from posenc_export.export.read_module import KNOWN, ReadAs, as_model
from posenc_export.models.block import AttentionBlock
from posenc_export.models.stack import Stack
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import measuring
from posenc_export.runtime.verification.grid_inputs import BATCHES
from posenc_export.runtime.verification.proof import Accuracy, Expected, accuracy_on, rounded_up
from posenc_export.runtime.verification.scenarios import Case
from posenc_export.shared.numerics import worst_error
from posenc_export.shared.refusal import refusal

FULL = "full pass"
LEAST = 8  # tokens of a sequence that every division needs
# Attributes of the objects that models of other libraries return.
FIELDS = ("logits", "last_hidden_state", "output")
DIFFERS = "docs/from-your-weights.md lists what often differs"


def compare(
    ours: Model | torch.nn.Module | Loaded, original: Callable[..., Any], inputs: Any
) -> dict[str, Any]:
    """Compare the outputs of a model with those of the module that it was built from: one full
    pass, and every division into calls of the parity grid.

    Args:
        ours: a block, a stack, another module, or an artefact that `load` returned.
        original: called with a tensor [B,S] int64 or [B,S,E] float32, whole sequences from position
            0. It returns a tensor [B,S,N], a tuple that begins with one, or an object with logits
            or last_hidden_state. A module must be in eval mode.
        inputs: token ids [B,S] or hidden states [B,S,E], an array or a tensor; at least 8 tokens,
            so that every division exists.

    Returns:
        {"passed": True, "tolerance": largest allowed error, "error": the worst one, "cells": {name:
        error}}; errors are relative to the largest output.

    Raises:
        ValueError: an error is above the tolerance, which allows for rounding alone; outputs of
            another shape; a module in training mode.
    """
    tokens = np.asarray(inputs.detach().cpu() if isinstance(inputs, Tensor) else inputs)
    if tokens.ndim < 2 or tokens.shape[1] < LEAST:
        rule = f"inputs [B,S] or [B,S,E] of at least {LEAST} tokens"
        raise refusal("compare", rule, list(tokens.shape), "give longer ones")
    if isinstance(original, torch.nn.Module) and original.training:
        got = "training mode, in which dropout is random"
        raise refusal("compare", "the original in eval mode", got, "call original.eval()")
    session, accuracy = _opened(ours, tokens)
    case = _case(tokens, original)
    whole = session.prefill(case.tokens, chunk=case.tokens.shape[1])
    if whole.shape != case.full.shape:
        rule = f"outputs of the original with shape {list(whole.shape)}"
        raise refusal("compare", rule, list(case.full.shape), "compare the same part of the model")
    error = rounded_up(worst_error(whole, case.full))
    if not error <= accuracy.tolerance:
        sees_later = bool(session.manifest.states) and _sees_later(original, case, accuracy)
        raise ValueError(_disagreement(ours, whole, case, error, accuracy, sees_later))
    expected = Expected(np.arange(case.full.shape[-1]), case, {}, None)
    measured = measuring.measure(session, expected, accuracy, lambda _: None)
    cells = {FULL: error, **measured.cells}
    worst = max(cells, key=lambda name: cells[name])
    if measured.exceeds(accuracy.tolerance):
        rule = f"errors within {accuracy.tolerance:.1e} for every division into calls"
        got = f"{cells[worst]:.1e} at '{worst}' and {error:.1e} in the full pass"
        raise refusal("compare", rule, got, "report this if the original is causal, as ours")
    return {"passed": True, "tolerance": accuracy.tolerance, "error": cells[worst], "cells": cells}


def _opened(ours: Model | torch.nn.Module | Loaded, inputs: np.ndarray) -> tuple[Session, Accuracy]:
    """Return a session of a model or an artefact, and the accuracy of its outputs."""
    if not isinstance(ours, Loaded):
        how = ReadAs()
        if not isinstance(ours, KNOWN):
            dtype = np.int64 if inputs.dtype.kind in "iu" else np.float32
            how = ReadAs(torch.from_numpy(inputs.astype(dtype)), inputs.shape[1])
        model = as_model(ours, how)
        session = eager_session(model)
        return session, accuracy_of(model, session.manifest)
    session = ours.session()
    if session.manifest.reference is None:
        rule = "an artefact with a tolerance"
        got = "one exported without verification"
        raise refusal("compare", rule, got, "export it again, or give the model")
    return session, accuracy_on(session.provider, session.manifest.reference)


def _case(inputs: np.ndarray, original: Callable[..., Any]) -> Case:
    """Return inputs with two endings, filled up with shifted copies, and the original's outputs."""
    count = max(BATCHES)
    shifted = [np.roll(inputs, shift, axis=1) for shift in range(-(-count // len(inputs)))]
    rows = np.concatenate(shifted)[:count]
    tokens = rows.astype(np.int64 if np.issubdtype(rows.dtype, np.integer) else np.float32)
    fork_at = tokens.shape[1] // 2
    other = np.concatenate((tokens[:, :fork_at], tokens[:, : fork_at - 1 : -1]), axis=1)
    full, other_full = _outputs(original, tokens), _outputs(original, other)
    return Case(tokens, full, [0] * count, fork_at, other, other_full)


def _outputs(original: Callable[..., Any], tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        value = first_output(original(torch.from_numpy(tokens.copy())))
    if not isinstance(value, Tensor):
        remedy = "give a function that returns the outputs alone"
        raise refusal("compare", "the original to return a tensor", type(value).__name__, remedy)
    return value.float().cpu().numpy()


def first_output(returned: Any) -> Any:
    """Return the output of a module of another library from what its forward returned: the output
    itself, a tuple that begins with it, or an object with logits or last_hidden_state.
    """
    value = returned[0] if isinstance(returned, (tuple, list)) else returned
    return next((getattr(value, name) for name in FIELDS if hasattr(value, name)), value)


def _sees_later(original: Callable[..., Any], case: Case, accuracy: Accuracy) -> bool:
    """Whether outputs of the original for earlier tokens change with the last token."""
    tokens = np.concatenate((case.tokens[:, :-1], case.tokens[:, :1]), axis=1)
    outputs = _outputs(original, tokens)[:, :-1]
    return not worst_error(outputs, case.full[:, :-1]) <= accuracy.tolerance


def _disagreement(
    ours: Any, whole: np.ndarray, case: Case, error: float, accuracy: Accuracy, sees_later: bool
) -> str:
    """Return a message that says which tokens differ. For the first token of a causal model, the
    output is independent of the number of heads, positions and scale. whole: outputs of ours.
    sees_later: whether ours is causal and the original is not.
    """
    bound = f"{accuracy.tolerance:.1e}"
    rule = f"compare: expected outputs within {bound} of those of the original, got {error:.1e}"
    if sees_later:
        difference = (
            "the original is not causal, as ours is: its outputs for earlier tokens change if "
            "only the last token changes"
        )
        return f"{rule}, and {difference}; give it a causal mask, or build ours with causal=False"
    where = "from the first token on: check weights, biases, norms"
    if worst_error(whole[:, :1], case.full[:, :1]) <= accuracy.tolerance:
        where = "only after the first token: check heads, encoding, theta, layout, scale"
    if isinstance(ours, (AttentionBlock, Stack)) and ours.config.attentions:
        row = (whole[:1], case.tokens[:1], case.full[:1])
        fault = hypotheses.explained(hypotheses.with_faults(ours), *row, accuracy.tolerance)
        where = f"{where.partition(':')[0]}: they agree if {fault.words}" if fault else where
    return f"{rule}, {where}; {DIFFERS}"
