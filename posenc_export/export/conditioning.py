"""How much rounding changes the outputs of a model (Higham, Accuracy and Stability, 1.6)."""

import copy
from typing import Any

import torch

from posenc_export.export.describe import Model
from posenc_export.export.expected import eager_session, full_pass
from posenc_export.export.sources import in_dtype
from posenc_export.runtime.verification.proof import Expected
from posenc_export.shared.numerics import LIMIT, SAFETY, worst_error

TRIES = 4  # copies with other random changes


def condition_factor(model: Model, expected: Expected, tolerance: float) -> float:
    """Return the factor, at least 1, by which a tolerance of float32 grows for a model.

    Each weight of a copy is changed by at most one unit in the last place, at random. The outputs
    then change as they do by rounding. If SAFETY times this change is above the tolerance, as in
    models whose activations have large outliers, no smaller tolerance is met by correct artefacts.

    Args:
        expected: outputs of the model, of every case.
        tolerance: that of numerics.tolerance, which assumes a well-conditioned model.
    """
    change, length = 0.0, max(case.tokens.shape[1] for case in expected.cases.values())
    for seed in range(TRIES):
        session = eager_session(disturbed(in_dtype(model, "float32"), seed), length)
        for start, case in expected.cases.items():
            outputs = full_pass(session, case.tokens, start, case.encoder)
            change = max(change, worst_error(outputs, case.full))
    return max(1.0, min(SAFETY * change, LIMIT) / tolerance)


def disturbed(model: Any, seed: int) -> Any:
    """Return a copy with each weight at most one unit in the last place higher or lower."""
    generator, other = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dtype == torch.float32:
                sign = torch.randint(-1, 2, parameter.shape, generator=generator)
                towards = torch.where(sign == 0, parameter, sign * torch.inf)
                parameter.copy_(torch.nextafter(parameter, towards))
    return other
