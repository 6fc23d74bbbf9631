"""A server that speaks OpenAI's completions, driven by the calls of a session: a call on new tokens
asks for the token behind each prompt that ends with one of them.

Shapes: B batch, S new tokens, L tokens of a sequence, V vocabulary.
"""

import copy
import json
import urllib.error
import urllib.request
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.auditing import graph, repeat
from posenc_export.auditing.facts import Reference
from posenc_export.auditing.inputs import Interface, Value
from posenc_export.auditing.session import TAGS, Call
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification.case import Cell, Pairs
from posenc_export.shared.numerics import (
    FLOAT16_NOISE,
    LIMIT,
    PEAK,
    SAFETY,
    rounding_tolerance,
    worst_error,
)
from posenc_export.shared.refusal import refusal

LISTED = 5  # most probable tokens that are compared
ASKED = 48  # tokens of a row, at most, that a call asks for: the last ones
GENERATED = 12  # tokens of a continuation
ROWS, AT_ONCE = 16, 4  # prompts of one token, and how many of them are in a request
SECONDS = 300.0  # of one request
PROGRAM = """# {title}.
# {mark}. Needs the running server.

import json
import sys
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else {url!r}
body = {body!r}
request = urllib.request.Request(
    url, json.dumps(body).encode(), {{"Content-Type": "application/json"}}
)
with urllib.request.urlopen(request) as reply:
    print("server  ", json.load(reply)["choices"][0]["logprobs"])
print("expected", {expected!r})
"""
Listed = List[Tuple[int, Dict[int, float]]]  # chosen ids with the log probabilities beside them


class Server:
    """A server that gives log probabilities of ids: `token_id:N` for return_tokens_as_token_ids, as
    vLLM and posenc serve do, or ids in `content`, as llama.cpp does.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        value = Value("prompt", "int64", ("batch", "sequence"))
        listed = Value("logprobs", "float32", ("batch", "sequence", LISTED))
        self.interface = Interface({"input_ids": value}, (), listed, continues=True)

    def complete(self, prompts: Sequence[np.ndarray], count: int) -> List[Listed]:
        """Return what follows each prompt: `count` tokens, or fewer if a text ends."""
        headers = {"Content-Type": "application/json"}
        body = json.dumps(_body(prompts, count)).encode()
        request = urllib.request.Request(self.url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                choices = json.load(reply)["choices"]
            ordered = sorted(choices, key=lambda choice: int(choice["index"]))
            return [_listed(choice["logprobs"]) for choice in ordered]
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            if "context" in said:  # of llama.cpp, vLLM and posenc serve
                raise graph.NotPossible("the context of the server is shorter") from None
            raise GraphError(ValueError(f"HTTP {error.code}: {said}")) from None
        except OSError as error:
            rule, got = "a server of completions", f"{self.url}: {error}"
            raise refusal("audit", rule, got, "start it, or correct the URL") from None
        except (KeyError, TypeError, ValueError) as error:
            rule = "log probabilities with ids of tokens"
            got = f"{self.url}: {type(error).__name__} {error}"
            raise refusal("audit", rule, got, "give a server that returns these") from None


def _listed(logprobs: Any) -> Listed:
    if "content" in logprobs:
        return [
            (int(token["id"]), {int(t["id"]): float(t["logprob"]) for t in token["top_logprobs"]})
            for token in logprobs["content"]
        ]

    def id_of(text: str) -> int:
        return int(text.removeprefix("token_id:"))

    tops = [{id_of(key): float(n) for key, n in top.items()} for top in logprobs["top_logprobs"]]
    return list(zip(map(id_of, logprobs["tokens"]), tops, strict=True))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the log probabilities of logits [..,V]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32)


class LogProbabilities:
    """A reference whose outputs are log probabilities."""

    def __init__(self, reference: Reference) -> None:
        self.reference, self.facts = reference, reference.facts
        self.known: Dict[bytes, np.ndarray] = {}  # outputs [1,V] behind prompts

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs."""
        return log_probabilities(self.reference.outputs(tokens, start))

    def behind(self, prompt: np.ndarray) -> np.ndarray:
        """Return the outputs [1,V] behind a prompt [L]. Those of its last ASKED beginnings are
        kept, so that a session that asks for these computes the prompt once.
        """
        if prompt.tobytes() not in self.known:
            outputs, length = self.outputs(prompt[None])[0], len(prompt)
            kept = 1 if self.facts.whole else ASKED
            for end in range(max(0, length - kept), length):
                self.known[prompt[: end + 1].tobytes()] = outputs[end : end + 1].copy()
        return self.known[prompt.tobytes()]

    def disturbed(self, seed: int) -> Optional[Reference]:
        """As Reference.disturbed."""
        other = self.reference.disturbed(seed)
        return other and LogProbabilities(other)


class ServerSession:
    """The calls of a session. What the server does not list is as the reference has it; tokens that
    no prompt asked for have the tag -1, so that they are not compared.
    """

    def __init__(self, server: Server, reference: LogProbabilities) -> None:
        self.server, self.reference = server, reference
        self.reset()

    def reset(self) -> None:
        """Remove all rows."""
        self.calls: List[Call] = []  # shared with forks
        self.rows: List[np.ndarray] = []
        self.asked: Dict[Tuple[int, ...], np.ndarray] = {}  # prompt by the tags of its outputs

    def prefill(
        self, inputs: Any, *, attention_mask: Optional[np.ndarray] = None, **others: Any
    ) -> np.ndarray:
        """As Session.prefill."""
        if attention_mask is not None:
            raise graph.NotPossible("a server takes no padding")
        new = [np.asarray(row) for row in inputs]
        old, first = self.rows or [row[:0] for row in new], len(self.calls)
        self.rows = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
        size, zeros = max(map(len, new)), np.zeros(len(new), np.int64)
        for tokens in self.rows:
            self.reference.behind(tokens)
        outputs = np.full((len(new), size, self.reference.facts.width + TAGS), -1, np.float32)
        for column in range(max(0, size - ASKED), size):
            asked = [row for row in range(len(new)) if column < len(new[row])]
            prompts = [self.rows[row][: len(old[row]) + column + 1] for row in asked]
            replies = self.server.complete(prompts, 1)
            for row, prompt, listed in zip(asked, prompts, replies, strict=True):
                if listed:  # posenc serve lists no token that ends a text
                    expected = self.reference.behind(prompt)
                    tagged = _tagged(expected, listed[:1], row, len(prompt) - 1, first)
                    outputs[row, column] = tagged[0]
                    self.asked[row, len(prompt) - 1, first] = prompt
        before = np.array([len(row) for row in old])
        self.calls.append(Call(size, int(before.max()), zeros, before, zeros, zeros))
        return outputs

    def tolerance(self) -> float:
        """Return the largest error of a right server, from the errors of prompts of one token,
        whose attention is trivial: these show how it rounds weights and activations. Caches, which
        these do not read, may be in float16.
        """
        width = self.reference.facts.width
        prompts = np.linspace(3, width - 1, min(ROWS, width - 3)).astype(np.int64)[:, None]
        parts = []
        for begin in range(0, len(prompts), AT_ONCE):
            self.reset()
            parts.append(self.prefill(prompts[begin : begin + AT_ONCE])[..., :width])
        actual = np.concatenate(parts)
        expected = np.stack([self.reference.behind(prompt) for prompt in prompts])
        error = SAFETY * worst_error(actual, expected)
        return max(PEAK * rounding_tolerance(FLOAT16_NOISE), min(LIMIT, error))

    def step(self, inputs: np.ndarray) -> np.ndarray:
        """As Session.step."""
        return self.prefill(inputs[:, None])[:, 0]

    def continued(self, prompts: np.ndarray) -> Pairs:
        """Yield the outputs of the tokens that the server generates behind prompts [B,L], and what
        they should be.
        """
        self.rows = [*prompts]
        zeros = np.zeros(len(self.rows), np.int64)
        lengths = np.array([len(row) for row in self.rows])
        self.calls.append(Call(GENERATED, 0, zeros, lengths, zeros, zeros))
        for row, listed in enumerate(self.server.complete(self.rows, GENERATED)):
            if listed:
                chosen = np.array([token for token, _ in listed[:-1]], np.int64)
                tokens = np.concatenate((self.rows[row], chosen))
                expected = self.reference.outputs(tokens[None])[0, -len(listed) :]
                index, call = len(tokens) - len(listed), len(self.calls) - 1
                for end in range(index, len(tokens)):
                    self.asked[row, end, call] = tokens[: end + 1]
                yield _tagged(expected, listed, row, index, call), expected

    def rewind(self, n: Any) -> None:
        """As Session.rewind."""
        counts = np.broadcast_to(n, (len(self.rows),))
        self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

    def fork(self) -> "ServerSession":
        """As Session.fork."""
        return copy.copy(self)


def request(session: ServerSession, cell: Cell, wrong: Sequence[float]) -> str:
    """Return a program that asks for the first wrong token of a cell; as for repeat.program."""
    token = repeat.wrong_token(session, cell, wrong)
    if token is None:
        return ""
    listed = np.argsort(-token.expected)[:LISTED]
    return PROGRAM.format(
        title=f"'{cell.name}', row {token.row}, token {token.index} of the sequence",
        mark=repeat.MARK,
        url=session.server.url,
        body=_body([session.asked[token.row, token.index, token.call]], 1),
        expected={int(id): round(float(token.expected[id]), 4) for id in listed},
    )


def _body(prompts: Sequence[np.ndarray], count: int) -> Dict[str, Any]:
    return {
        "prompt": [prompt.tolist() for prompt in prompts], "max_tokens": count, "temperature": 0,
        "logprobs": LISTED, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def _tagged(expected: np.ndarray, listed: Listed, row: int, index: int, call: int) -> np.ndarray:
    """Return outputs [n,V] with the listed numbers of the server, and tags."""
    outputs = np.pad(expected, ((0, 0), (0, TAGS)))
    for place, (_, top) in enumerate(listed):
        outputs[place, [*top]] = [*top.values()]
        outputs[place, -TAGS:] = row, index + place, call
    return outputs
