"""Compare the eager module with the float64 oracle."""

from typing import Dict

import numpy as np

from posenc_export.export.describe import Model
from posenc_export.export.edges import edges_of
from posenc_export.export.read_module import ReadModule
from posenc_export.export.sources import in_dtype
from posenc_export.models import oracle
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.verification.grid_inputs import BESIDE, LongSequence, encoder_rows
from posenc_export.runtime.verification.proof import Expected, rounded_up
from posenc_export.runtime.verification.scenarios import Case
from posenc_export.shared.numerics import worst_error
from posenc_export.shared.progress import Progress, Steps, silent

# Tokens of a sequence that a module reads in float64, with the scores of all pairs; more if its
# computation changes behind them. Calls are compared at this number of cached tokens (edges.py).
EXACT = 512


def against(model: Model) -> str:
    """Return a description of the reference that the eager module is compared with."""
    if isinstance(model, ReadModule):
        return "the module itself in float64 on whole sequences"
    return "its formula in float64"


def _oracle_of(model: Model, case: Case, start: int) -> np.ndarray:
    """Return the oracle's output for the first row of a case, [1,L,*] float64."""
    encoder = None if case.encoder is None else case.encoder[0]
    return oracle.full_pass(model, case.tokens[0], start, encoder=encoder)[None]


def _read_at_once(model: Model, sequence: LongSequence) -> int:
    """Return how many tokens of a sequence a causal module reads in float64."""
    length = sequence.tokens.shape[1]
    edges = [at for at in edges_of(model).values() if at < length]
    return min(max([EXACT, *edges]) + BESIDE + 1, length)


def oracle_cells(
    model: Model, manifest: Manifest, expected: Expected, say: Progress = silent
) -> Dict[str, float]:
    """Return the errors of the expected outputs of one row per case against the float64 oracle."""
    cells, model = {}, in_dtype(model, "float32")
    what = f"{manifest.target}: comparing the module with its formula"
    steps = Steps(say, what, len(expected.cases) + len(expected.attribute_cases), "rows")
    read = isinstance(model, ReadModule)  # whose own code begins at position 0
    if read and expected.long is not None:
        sequence = expected.long
        length = sequence.tokens.shape[1]
        if manifest.states:  # otherwise each token may see all others
            length = _read_at_once(model, sequence)
        compared, outputs = sequence.within(0, length)
        (encoded,) = encoder_rows(manifest, 1) or (None,)
        exact = oracle.full_pass(model, sequence.tokens[0, :length], 0, encoder=encoded)[compared]
        cells["oracle, the long sequence"] = worst_error(outputs[0], exact)
    for start, case in expected.cases.items():
        if read and start:
            continue
        exact = _oracle_of(model, case, start)
        cells[f"oracle, start {start}"] = worst_error(case.full[:1], exact)
        if case.readout is not None and isinstance(model, ReadModule):
            cells[f"oracle, start {start}: {manifest.outputs[1].name}"] = worst_error(
                case.readout[0], model.readout.exact(exact[0])
            )
        steps.advance()
    for name, (fed, full) in expected.attribute_cases.items():
        row = int(fed.mask.all(1).argmax())  # the first without padding
        numbers = {key: array[..., row, :] for key, array in fed.attributes.items()}
        exact = oracle.full_pass(model, fed.tokens[row], 0, **numbers)
        cells[f"{name}: oracle"] = worst_error(full[row], exact)
        steps.advance()
    return {name: rounded_up(error) for name, error in cells.items()}
