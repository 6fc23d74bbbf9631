"""A loaded artefact: one graph with its weights, shared by any number of sessions."""

from pathlib import Path
from typing import Any, Optional, Sequence, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import cached_rows, saved, sentences
from posenc_export.runtime.session.argument_arrays import at_least
from posenc_export.runtime.session.forecaster import Forecaster
from posenc_export.runtime.session.session import Session


class Model:
    """A loaded artefact, as returned by `load`. Threads may share a model; each session must be
    used by one thread at a time.

    Args:
        graph: OrtGraph or TorchGraph.
        folder: folder of the artefact; None for a module in memory.
    """

    def __init__(self, graph: Any, folder: Optional[Path] = None) -> None:
        self.graph, self.folder = graph, folder

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artefact."""
        return self.graph.manifest

    @property
    def provider(self) -> str:
        """The provider that runs the graph, as `load` takes it, never "auto"."""
        return str(self.graph.provider)

    def session(
        self, batch: int = 1, capacity: Optional[int] = None, rewind: int = cached_rows.REWIND
    ) -> Session:
        """Open a session with empty caches on this graph.

        Args:
            batch: number of rows to allocate caches for. If a prefill or an admit needs more rows,
                the caches are moved to larger memory.
            capacity: largest number of tokens per row in caches that are written in place; None
                allows the whole range of positions.
            rewind: number of tokens, counted from the longest length a row has had, that
                `Session.rewind` can take back if states are replaced by each call (recurrent
                encodings, linear attention), or if caches of windows keep the last tokens only.
                Memory grows with it.

        Raises:
            ValueError: an argument is not a whole number of at least 1.
        """
        most = 1 if capacity is None else capacity
        for name, value in (("batch", batch), ("capacity", most), ("rewind", rewind)):
            at_least(name, value, 1)
        return Session(self.graph, batch, capacity, rewind)

    def forecaster(self) -> Forecaster:
        """Open a session that forecasts series. ValueError: the model does not forecast."""
        return Forecaster(self.session())

    def restore(
        self,
        file: Union[str, Path],
        batch: int = 1,
        capacity: Optional[int] = None,
        rewind: int = cached_rows.REWIND,
    ) -> Session:
        """Open a session with the rows and caches that Session.save wrote. States that each call
        replaces cannot be rewound to before they were saved.

        Args:
            batch, capacity, rewind: as for `session`.

        Raises:
            ValueError: the file is no saved session, was truncated or changed, or belongs to
                another artefact; a row exceeds the capacity. Otherwise as `session`.
            OSError: the file cannot be read.
        """
        session = self.session(batch, capacity, rewind)
        with saved.opened(Path(file), self.manifest) as arrays:
            session._state = saved.restored(session._state, arrays)
        return session

    def encode(
        self, texts: Sequence[str], prompt: Optional[str] = None, batch: int = sentences.BATCH
    ) -> np.ndarray:
        """Return the sentence embeddings of texts [n,E] float32, in their order.

        The tokenizer of the artefact cuts texts to the maximal length of the checkpoint. Threads
        may call it on one model.

        Args:
            prompt: name of a prompt of the checkpoint to put before each text; None for its default
                prompt, which most checkpoints do not have.
            batch: largest number of tokens, padding included, that are read together. Texts of
                similar length are.

        Raises:
            ValueError: the artefact has no output sentence_embedding or no tokenizer, texts are not
                a list of text, or there is no such prompt.
            ModuleNotFoundError: tokenizers is not installed.
            GraphError: the graph failed.
        """
        return sentences.embed(self, sentences.rows_of(self, texts, prompt), batch)
