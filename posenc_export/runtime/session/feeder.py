"""Graph inputs of the runs that feed tokens.

Shapes: B batch, S new tokens, T columns in use, R tokens whose logits are requested.
"""

import itertools
from typing import List

import numpy as np

from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.graph_inputs import INPUTS, PaddedTokens
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.arguments import RowTokens
from posenc_export.runtime.session.graph import Feeds, GraphRun
from posenc_export.runtime.session.state import SessionState

STEP_SLOTS = 128  # least multiple of slots that steps count


class Feeder:
    """Builds the graph inputs of a session on a provider."""

    def __init__(self, manifest: Manifest, provider: str) -> None:
        self.manifest = manifest
        # Fewest logits to request for a row: CUDA kernels cannot be launched on empty tensors.
        self.fewest = 0 if provider == "cpu" else 1
        # Whether first tokens are announced with their padding, and steps count slots in multiples.
        self._whole_rows = provider == "cuda"
        names = {value.name for value in manifest.inputs}
        self.selects = "logits_index" in names  # the graph computes only the requested outputs
        # Inputs that count slots in multiples, and inputs that grow by one with each token.
        counts = "slots" in names or ("total_sequence_length" in names and self._whole_rows)
        self.counted_inputs = names & {"slots", "total_sequence_length"} if counts else set()
        self.counters = {name for name in names if INPUTS[name].counts} - self.counted_inputs

    def located(self, state: SessionState, tokens: RowTokens) -> RowTokens:
        """Return tokens with coordinates, by default their positions, or 0 if coordinates have a
        range of their own.
        """
        axes = self.manifest.axes
        if not axes or "grid" in tokens.planes:
            return tokens
        begins = (state.first_position + state.length)[tokens.rows, None]
        columns = np.arange(tokens.x.shape[1])
        own = bool(self.manifest.coordinate_range)
        positions = np.where((columns < tokens.counts[:, None]) & (not own), begins + columns, 0)
        grid = np.repeat(positions[None], axes, 0)  # [axes,n,S]
        return tokens._replace(planes={**tokens.planes, "grid": grid})

    def runs(self, state: SessionState, tokens: RowTokens) -> List[GraphRun]:
        """Return one run for all rows; of a graph that continues a single row at a time, one for
        each row, and one for neighbours that read a token each.
        """
        counts, new = tokens.counts, int(tokens.counts.max())
        committed = state.length[tokens.rows]
        # With S > 1, a row without new tokens cannot share the run: its padding would be written
        # over its last token.
        together = len(counts) == 1 or not committed.any() or (new == 1 and counts.all())
        if self.manifest.continuation_rows != 1 or together:
            feeds = self.fill(state, tokens, new)
            return [GraphRun(tokens.rows.start, len(counts), new, feeds)]
        runs, by_columns = [], self.manifest.by_columns

        def joint(row: int) -> int:
            return -1 if counts[row] == 1 and not by_columns else row

        for _, group in itertools.groupby(range(len(counts)), key=joint):
            some = list(group)
            width = new if by_columns else int(counts[some[0]])
            if width:
                part = tokens.part(some[0], some[-1] + 1)
                feeds = self.fill(state, part, width)
                runs.append(GraphRun(part.rows.start, len(some), width, feeds))
        return runs

    def repeated(self, state: SessionState, new: int) -> Feeds:
        """Return the graph inputs for `new` zero tokens of every row, with all outputs requested,
        and slots in multiples.
        """
        source, counts = self.manifest.inputs[0], np.full(state.rows, new)
        zeros = np.zeros((state.rows, new, *source.token_shape), source.dtype)
        tokens = self.located(state, RowTokens(slice(0, state.rows), zeros, counts, counts, {}))
        feeds = self.fill(state, tokens, new)
        slots = self.counted(state, state.used + new)
        if "slots" in self.counted_inputs:
            feeds["slots"] = np.arange(slots)
        if "total_sequence_length" in self.counted_inputs:
            feeds["total_sequence_length"][...] = slots
        return feeds

    def counted(self, state: SessionState, needed: int) -> int:
        """Return how many slots steps count: more than the `needed` ones of the longest row, at
        most a quarter more or STEP_SLOTS. 0 if the inputs change with each step.

        So the inputs of a step with slots, or of a CUDA graph, which does not read
        total_sequence_length again, change rarely. Slots without a token get scores too.
        """
        if not self.counted_inputs:
            return 0
        part = max(STEP_SLOTS, 1 << max(needed.bit_length() - 3, 0))
        return min(-(-needed // part) * part, state.caches.graph_slots)

    def fill(self, state: SessionState, tokens: RowTokens, new: int) -> Feeds:
        """Fill the graph inputs that the manifest lists, by name, with `new` columns for tokens."""
        rows, counts, planes = tokens.rows, tokens.counts, tokens.planes
        length = state.length[rows]
        x = np.ascontiguousarray(tokens.x[:, :new])
        if planes:
            planes = {name: plane[:, :, :new] for name, plane in planes.items()}
        # With a bias, GroupQueryAttention on CUDA (ONNX Runtime 1.31) subtracts S from the length
        # of each row to get its cached tokens. For a short row of a first call that is negative,
        # and shifts its causal mask. There, rows have all S columns: tokens see no padding, which
        # follows them, and the next tokens overwrite it.
        whole = self._whole_rows and not length.any()
        valid = np.full_like(counts, new) if whole else counts
        first_position, occupied = state.first_position[rows], state.occupied[rows]
        kept = state.caches.notes.windows.first_kept[rows]
        requested = tokens.requested
        if self.fewest:
            requested = np.maximum(requested, self.fewest)
        padded = PaddedTokens(
            x, counts, length, first_position, requested, occupied, valid, kept, planes
        )
        feeds = graph_inputs.fill(self.manifest, padded)
        return {**feeds, **state.encoder_outputs.select(rows)} if state.encoder_outputs else feeds
