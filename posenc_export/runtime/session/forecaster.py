"""Forecasts of series: values in patches, normalised by the mean and standard deviation of all
values so far (Das et al. 2025, TimesFM 2.5; reversible instance normalisation, Kim et al. 2022).

Shapes: B series, S patches, N quantiles.
"""

from dataclasses import dataclass
from typing import Annotated, List, Optional, Sequence, Tuple

import numpy as np
from msgspec import Meta, Struct

from posenc_export.runtime.session.arguments import Inputs, array_of, short_repr
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.session import Session
from posenc_export.shared.foreign import typed

LARGEST = 1e100  # below which sums of squares are finite


class Settings(Struct):
    """What is read of the description of a forecast."""

    horizon: Annotated[int, Meta(ge=1)]
    quantiles: List[float]
    symmetric: bool = False
    positive: bool = False


@dataclass(frozen=True)
class Past:
    """What is known of the values that were read of a series. Sums are those of differences from
    the first value, in float64: they lose no digits if values are large and differ little.
    """

    first: float = 0.0
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    least: float = np.inf

    def read(self, values: np.ndarray, patch: int) -> Tuple["Past", np.ndarray, np.ndarray]:
        """Read values [n]. Return what is then known, the features [S,2*patch] float32 of the new
        patches, and mean and standard deviation [S,2] of the values up to the end of each.
        """
        padding = -len(values) % patch
        first = self.first if self.count else float(values[0])
        offsets = values - first
        ends = np.arange(patch - padding, len(values) + 1, patch)
        sums = np.stack((offsets, offsets**2)).cumsum(1)[:, ends - 1]
        count, (total, squares) = self.count + ends, sums + [[self.total], [self.squares]]
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
        inside = np.arange(padding + len(values)).reshape(-1, patch) >= padding
        scaled = np.pad(offsets, (padding, 0)).reshape(-1, patch) - mean[:, None]
        scaled = np.where(inside, scaled / np.where(deviation > 0, deviation, 1)[:, None], 0)
        features = np.concatenate((scaled, ~inside), axis=1).astype(np.float32)
        statistics = np.stack((first + mean, deviation), axis=1)
        least = min(self.least, float(values.min()))
        return Past(first, int(count[-1]), total[-1], squares[-1], least), features, statistics


class Forecaster:
    """A session on a model that forecasts series, opened by `Model.forecaster`.

    A series begins at any value: its first patch is padded in front. Values are normalised by the
    mean and standard deviation of the values up to the end of their patch, and forecasts are
    returned in the units of the series.

    Args:
        session: a new session on such a model.

    Attributes:
        session: the session. Its tokens are patches, and its rows the series, followed by their
            negatives if the model averages both forecasts.
        patch: number of values of a patch.
        horizon: number of values of a forecast.
        quantiles: levels of the quantiles.

    Raises:
        ValueError: the model does not forecast series.
    """

    def __init__(self, session: Session) -> None:
        manifest = session.manifest
        described = manifest.config.get("forecast")
        if not isinstance(described, dict):
            got = f"kind {manifest.kind} with output {manifest.outputs[0].name}"
            raise expected("a model that forecasts series", got, "export one of type timesfm2_5")
        settings = typed("session", "forecast", described, Settings, "export again")
        self.session, self.horizon, self.quantiles = session, settings.horizon, settings.quantiles
        self._symmetric, self._positive = settings.symmetric, settings.positive
        self.patch, self._dtype = int(manifest.inputs[0].axes[2]) // 2, manifest.inputs[0].dtype
        self._past: List[Past] = []

    def reset(self) -> None:
        """Forget all series."""
        self.session.reset()
        self._past = []

    def forecast(self, series: Inputs, chunk: Optional[int] = None) -> np.ndarray:
        """Read values, and return the forecasts after them.

        Args:
            series: values of each series, [B,n] or a list of rows [n] of different lengths. After
                the first call, these are the next values of the same series, a multiple of `patch`
                for each.
            chunk: number of patches of a series to read at a time; None for that of the manifest.

        Returns:
            The forecasts [B,horizon,1+N] float64 of the next values: mean, then quantiles.

        Raises:
            ValueError: a series is empty, has values that are no finite numbers or more than the
                range of positions; another number of series or of new values; the session was used
                otherwise.
            GraphError: the graph failed. Call `reset` if chunks were read.
        """
        rows = self._checked(series)
        last = [-(-len(row) // self.patch) - 1 for row in rows]
        return self._read(rows, chunk)[np.arange(len(rows)), last]

    def forecasts(self, series: Inputs, chunk: Optional[int] = None) -> np.ndarray:
        """Return the forecasts [B,S,horizon,1+N] after each new patch of a series, with zeros
        behind shorter ones. Arguments and errors as for `forecast`.
        """
        return self._read(self._checked(series), chunk)

    def _read(self, rows: Sequence[np.ndarray], chunk: Optional[int]) -> np.ndarray:
        past = self._past or [Past()] * len(rows)
        read = [known.read(row, self.patch) for known, row in zip(past, rows, strict=True)]
        features = [part for _, part, _ in read]
        if self._symmetric:
            signs = np.repeat(np.array([-1, 1], np.float32), self.patch)
            features += [part * signs for part in features]
        alike = len({len(part) for part in features}) == 1
        patches = np.stack(features).astype(self._dtype) if alike else features
        outputs = self.session.prefill(patches, chunk=chunk)
        outputs = outputs.reshape((*outputs.shape[:2], self.horizon, -1)).astype(np.float64)
        if self._symmetric:
            outputs, negated = np.split(outputs, 2)
            negated[..., 1:] = negated[..., :0:-1]
            outputs = (outputs - negated) / 2
        self._past = [known for known, _, _ in read]
        for output, (known, _, statistics) in zip(outputs, read, strict=True):
            mean, deviation = statistics.T[:, :, None, None]
            output[: len(statistics)] = output[: len(statistics)] * deviation + mean
            if self._positive and known.least >= 0:
                np.maximum(output, 0, out=output)
        return outputs

    def _checked(self, series: Inputs) -> Sequence[np.ndarray]:
        """Return the values of each series in float64, after checking them and the session."""
        rows = []
        for row in (array_of("a series", values) for values in series):
            numbers = row.ndim == 1 and row.dtype.kind in "fiu"
            rows.append(row.astype(np.float64) if numbers else np.full(1, np.nan))
            if not (np.abs(rows[-1]) < LARGEST).all():
                remedy = "put a single series into a list, and fill gaps"
                raise expected("series of finite numbers [n]", short_repr(row), remedy)
        lengths, patch = [len(row) for row in rows], self.patch
        if not min(lengths, default=0):
            raise expected("at least one value of each series", f"{lengths}", "leave it out")
        if self._past and (len(rows) != len(self._past) or any(n % patch for n in lengths)):
            rule = f"a multiple of {patch} values for each of {len(self._past)} series"
            raise expected(rule, f"{lengths}", "call reset to begin other series")
        read = [-(-known.count // patch) for known in self._past] * (2 if self._symmetric else 1)
        if self.session.length.tolist() != read:
            got = f"{self.session.length.tolist()}"
            raise expected(f"a session that has read {read} patches", got, "call reset")
        return rows
