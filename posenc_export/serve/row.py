"""A request with a row of the session, and what is known of its tokens."""

from collections import deque
from typing import Deque, List, Optional, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.drafts import Drafts
from posenc_export.runtime.session.generation import choose
from posenc_export.runtime.session.prefixes import BLOCK
from posenc_export.runtime.session.token_rules import TokenRules
from posenc_export.serve.requests import LENGTH, STOP, Request, Token


class Row:
    """A request with a row of the session.

    Args:
        known: number of tokens of its prompt that are not read.

    Attributes:
        unread: tokens that were not fed yet: of the prompt, later the last generated one.
        generated: the generated tokens.
        rules: what the artefact forbids or forces among them.
        kept: number of blocks of its tokens that were given to the prefixes.
        drafts: drafts of its next tokens, from its first step with drafts on.
    """

    def __init__(self, request: Request, manifest: Manifest, known: int = 0) -> None:
        self.request, self.kept = request, known // BLOCK
        self.rules = TokenRules(manifest.generation, np.array([len(request.prompt)]))
        self.unread: Deque[int] = deque(request.prompt[known:])
        self.generated: List[int] = []
        self.random = np.random.default_rng(request.seed)
        self.drafts: Optional[Drafts] = None

    def take(self, count: int) -> List[int]:
        """Remove and return the next `count` tokens to feed."""
        return [self.unread.popleft() for _ in range(min(count, len(self.unread)))]

    def next_token(self, likeliest: int, logits: np.ndarray) -> Token:
        """Choose the next token from its logits [1,V]. The next step feeds it."""
        request, allowed = self.request, self.rules.applied(logits, len(self.generated))
        if request.temperature == 0:
            token = likeliest if allowed is logits else int(allowed[0].argmax())
        else:
            how = (request.temperature, request.top_k, request.top_p, self.random)
            token = int(choose(allowed, *how)[0])
        self.generated.append(token)
        self.unread.append(token)
        ended = LENGTH if len(self.generated) == request.max_tokens else ""
        ended = STOP if token in request.stop_ids else ended
        count = request.logprobs
        logprobs = () if count is None else log_probabilities(logits[0], token, count)
        return Token(request, token, ended, logprobs)


def log_probabilities(logits: np.ndarray, token: int, count: int) -> Tuple[Tuple[int, float], ...]:
    """Return id and logarithm of the probability (softmax of logits [V], before temperature and
    sampling) of a token, then of the `count` most probable ones.
    """
    shifted = logits.astype(np.float64) - logits.max()
    logarithms = shifted - np.log(np.exp(shifted).sum())
    ids = (token, *np.argsort(-logarithms, kind="stable")[:count].tolist())
    return tuple((id, float(logarithms[id])) for id in ids)
