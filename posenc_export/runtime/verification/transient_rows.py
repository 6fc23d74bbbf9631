"""Run a scenario on a session whose batch also holds a guest row, which is admitted and retired
between calls.
"""

from typing import Any, Dict, List, Optional, Sequence, Union

import numpy as np

from posenc_export.runtime.session.session import Session


class WithTransientRows:
    """The interface of a session for the rows of a scenario, while a guest row is present in every
    second call.

    The first guest has index 0. When it is retired, the last row of the scenario moves to that
    index.

    Args:
        session: an empty session whose target supports admit and retire.
        guests: tokens of the guests [n,L] or [n,L,E].
        start: position of a guest's first token.
        encoder: encoder outputs of each guest [q,N], if the model reads an encoder.
    """

    def __init__(
        self,
        session: Session,
        guests: np.ndarray,
        start: int,
        encoder: Optional[Sequence[np.ndarray]] = None,
    ) -> None:
        self.session, self.manifest = session, session.manifest
        self.guests, self.start, self.encoder = guests, start, encoder
        self.order: List[int] = []  # index in the session of each row of the scenario
        self.guest: Optional[int] = None

    def prefill(
        self,
        inputs: Union[np.ndarray, Sequence[Any]],
        start: Any = None,
        attention_mask: Optional[np.ndarray] = None,
        chunk: Optional[int] = None,
        encoder: Optional[Sequence[np.ndarray]] = None,
        logits_to_keep: int = 0,
    ) -> np.ndarray:
        """Run Session.prefill for the rows of the scenario; the first call includes a guest."""
        rows = [
            np.asarray(row) if attention_mask is None else row[attention_mask[index] == 1]
            for index, row in enumerate(inputs)
        ]
        beginning = {} if self.order else self._beginning(len(rows), start, encoder)
        if not self.order:
            self.order, self.guest = list(range(1, len(rows) + 1)), 0
            together = [self.guests[0, :4], *rows]
        else:
            self._exchange()
            together = [self.guests[0, :0]] * self.session.batch
            for index, row in zip(self.order, rows, strict=True):
                together[index] = row
        outputs = self.session.prefill(
            together, chunk=chunk, logits_to_keep=logits_to_keep, **beginning
        )
        lengths = np.array([len(row) for row in rows])
        if logits_to_keep:  # outputs are aligned to the last column
            return outputs[self.order, -min(logits_to_keep, lengths.max()) :]
        mask = np.arange(lengths.max()) < lengths[:, None]
        mask = mask if attention_mask is None else attention_mask == 1
        padded = np.zeros((*mask.shape, outputs.shape[-1]), outputs.dtype)
        for row, index in enumerate(self.order):
            padded[row, mask[row]] = outputs[index, : lengths[row]]
        return padded

    def _beginning(
        self, rows: int, start: Any, encoder: Optional[Sequence[np.ndarray]]
    ) -> Dict[str, Any]:
        """Return the arguments of the first call, on the first guest and the rows."""
        starts = [self.start, *np.broadcast_to(start or 0, rows).tolist()]
        sources = None if self.encoder is None else [self.encoder[0], *(encoder or ())]
        return {"start": starts, "encoder": sources}

    def step(self, inputs: np.ndarray) -> np.ndarray:
        """Run Session.step for the rows of the scenario."""
        self._exchange()
        together = np.repeat(self.guests[:1, 4], self.session.batch, 0)
        together[self.order] = inputs
        return self.session.step(together)[self.order]

    def rewind(self, n: Any) -> None:
        """Run Session.rewind for the rows of the scenario; the guest is not rewound."""
        back = np.zeros(self.session.batch, np.int64)
        back[self.order] = n
        self.session.rewind(back)

    def fork(self) -> "WithTransientRows":
        """Run Session.fork; the fork has the same guest."""
        other = WithTransientRows(self.session.fork(), self.guests, self.start, self.encoder)
        other.order, other.guest = list(self.order), self.guest
        return other

    def _exchange(self) -> None:
        """Retire the guest, or admit one if there is none."""
        if self.guest is None:
            self.session.admit(
                self.guests[1:2, :3], start=self.start, encoder=self.encoder and self.encoder[1:2]
            )
            self.guest = self.session.batch - 1
        else:
            last = self.session.batch - 1
            self.session.retire(self.guest)
            self.order = [self.guest if index == last else index for index in self.order]
            self.guest = None
