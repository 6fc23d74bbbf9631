"""A server that speaks OpenAI's completions, driven by the calls of a session: a call on new tokens
asks for the token behind each prompt that ends with one of them.

Shapes: B batch, S new tokens, L tokens of a sequence, V vocabulary.
"""

import copy
import http.client
import json
import os
import queue
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import msgspec
import numpy as np

from posenc_export.auditing import graph, repeat
from posenc_export.auditing.facts import Reference
from posenc_export.auditing.inputs import Interface, Value
from posenc_export.auditing.session import TAGS, Call
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification.scenarios import Cell, Pairs
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
SECONDS = 300.0  # of one request, its reply included
BYTES = 16 << 20  # of a reply
LARGEST = 1e30  # absolute log probability, of which 1e-3 may be rounding above 0
SHOWN = 200  # characters of a reply in a message
KEY = re.compile(r"[\w.~+/=-]+", re.ASCII)  # RFC 6750, section 2.1
TOO_LONG, NOT_ALLOWED = (400, 413, 422), (401, 403)  # status of replies
PROGRAM = """# {mark}. Needs the running server.
# {title}.

import json
import sys
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else {url!r}
body = {body!r}
request = urllib.request.Request(
    url, json.dumps(body).encode(), {{"Content-Type": "application/json"}}
)
{authorized}with urllib.request.urlopen(request) as reply:
    print("server  ", json.load(reply)["choices"][0]["logprobs"])
print("expected", {expected!r})
"""
# A header that is not sent to where a server redirects to.
AUTHORIZED = """import os

request.add_unredirected_header("Authorization", "Bearer " + os.environ[{!r}])
"""
Listed = List[Tuple[int, Dict[int, float]]]  # chosen ids with the log probabilities beside them


# Replies as far as they are read: content as llama.cpp lists it, or the other two as vLLM does.
class _Top(msgspec.Struct):
    id: int
    logprob: float


class _Token(msgspec.Struct):
    id: int
    top_logprobs: List[_Top]


class _Logprobs(msgspec.Struct):
    content: Optional[List[_Token]] = None
    tokens: Optional[List[str]] = None
    top_logprobs: Optional[List[Dict[str, float]]] = None


class _Choice(msgspec.Struct):
    index: int
    logprobs: _Logprobs
    finish_reason: Optional[str] = None


class _Completions(msgspec.Struct):
    choices: List[_Choice]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Leave a redirect to the caller, as an HTTPError."""


class Server:
    """A server that gives log probabilities of ids: `token_id:N` for return_tokens_as_token_ids, as
    vLLM and posenc serve do, or ids in `content`, as llama.cpp does.

    Args:
        url: http:// or https://, host, port and path, with or without /v1 at its end.
        variable: name of the environment variable with the key that the server asks for. The key is
            sent to this server only, and is in no message and no program.

    Raises:
        ValueError: another URL, or no such variable.
    """

    def __init__(self, url: str, variable: Optional[str] = None) -> None:
        self.variable, self.key = variable, "" if variable is None else _key(variable)
        self.url = _checked(url).rstrip("/").removesuffix("/v1") + "/v1/completions"
        value = Value("prompt", "int64", ("batch", "sequence"))
        listed = Value("logprobs", "float32", ("batch", "sequence", LISTED))
        self.interface = Interface({"input_ids": value}, (), listed, continues=True)

    def complete(self, prompts: Sequence[np.ndarray], count: int, width: int) -> List[Listed]:
        """Return what follows each prompt: `count` tokens, or fewer if a text ends. width: number
        of ids of tokens. Raise ValueError for a reply that has no log probabilities of these, or
        NotPossible for a prompt that is too long, or GraphError for another error of the server.
        """
        status, headers, body, missing = self._reply(json.dumps(_body(prompts, count)).encode())
        said = self._shown(body.decode(errors="replace"))
        if status in TOO_LONG and "context" in said:  # of llama.cpp, vLLM and posenc serve
            raise graph.NotPossible("the context of the server is shorter")
        if status >= 400 and status not in NOT_ALLOWED:
            raise GraphError(ValueError(f"HTTP {status}: {said}"))
        if status != 200:
            got = f"HTTP {status} {self._shown(headers.get('Location', ''))}: {said}"
            remedy = "give the URL that answers, or --api-key if the server asks for a key"
            raise self._refused("a reply with HTTP 200", got, remedy)
        for name, words in (("Content-Type", "json"), ("Content-Encoding", "identity")):
            text = str(headers.get(name, words))
            if words not in text.lower():
                raise self._refused(f"a reply with {name} {words}", self._shown(text))
        if len(body) > BYTES or missing:
            got = f"a body that lacks {missing} bytes" if missing else "a longer one"
            raise self._refused(f"a whole reply of at most {BYTES >> 20} MiB", got)
        try:
            choices = msgspec.json.decode(body, type=_Completions).choices
        except (RecursionError, ValueError) as error:  # msgspec's, too
            rule = "a reply in JSON with the log probabilities of ids"
            raise self._refused(rule, f"{error}, in the body {said!r}") from None
        choices.sort(key=lambda choice: choice.index)
        if [choice.index for choice in choices] != [*range(len(prompts))]:
            got = self._shown(str([choice.index for choice in choices]))
            raise self._refused(f"the index of each of {len(prompts)} choices", got)
        return [self._listed(choice, count, width) for choice in choices]

    def _reply(self, body: bytes) -> Tuple[int, Any, bytes, int]:
        """Return status, headers and body of the reply to a request, and how many bytes it lacks.
        It is read within SECONDS, and not far beyond BYTES.
        """
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        if self.key:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        replies: "queue.SimpleQueue[Any]" = queue.SimpleQueue()

        def ask() -> None:
            try:
                try:
                    reply: Any = urllib.request.build_opener(_NoRedirects).open(
                        request, None, SECONDS
                    )
                except urllib.error.HTTPError as error:
                    reply = error
                with reply:
                    read = reply.read(BYTES + 1)
                    replies.put((reply.status, reply.headers, read, reply.length or 0))
            except (OSError, http.client.HTTPException, ValueError) as error:
                replies.put(f"{type(error).__name__} {error}")

        # Only another thread limits the time of headers that arrive byte by byte.
        threading.Thread(target=ask, daemon=True).start()
        try:
            reply = replies.get(timeout=SECONDS)
        except queue.Empty:
            reply = f"no whole reply within {SECONDS:g} s"
        if isinstance(reply, str):
            remedy = "start it, or correct the URL"
            raise self._refused("a server of completions", self._shown(reply), remedy)
        return reply

    def _listed(self, choice: _Choice, count: int, width: int) -> Listed:
        """Return the tokens of a choice. Raise ValueError for what are no log probabilities."""
        where, named = f"choices[{choice.index}].logprobs", choice.logprobs
        tokens, tops = named.tokens or [], named.top_logprobs or []
        if named.content is not None:
            rows = [
                (t.id, [(top.id, top.logprob) for top in t.top_logprobs]) for t in named.content
            ]
        elif len(tokens) == len(tops):
            known = [[(self._id(where, key), p) for key, p in top.items()] for top in tops]
            rows = [(self._id(where, text), top) for text, top in zip(tokens, known, strict=True)]
        else:
            got = f"{len(tokens)} and {len(tops)}"
            raise self._refused(f"as many tokens as top_logprobs in {where}", got)
        # Servers need not list the token that ends a text.
        if len(rows) > count or not rows and choice.finish_reason != "stop":
            rule = f"1 to {count} tokens in {where}, or none if finish_reason is stop"
            raise self._refused(rule, f"{len(rows)} and {choice.finish_reason}")
        for token, top in rows:
            if not top:
                raise self._refused(f"log probabilities beside each token in {where}", "none")
            for id, number in ((token, 0.0), *top):
                if not 0 <= id < width:
                    rule = f"ids of tokens in {where} from 0 to {width - 1}, as in the reference"
                    raise self._refused(rule, self._shown(str(id)))
                if not -LARGEST <= number <= 1e-3:
                    raise self._refused(f"log probabilities in {where}, at most 0", f"{number:g}")
        return [(token, dict(top)) for token, top in rows]

    def _id(self, where: str, text: str) -> int:
        digits = text.removeprefix("token_id:")
        if not re.fullmatch("[0-9]{1,18}", digits):
            rule = f"tokens in {where} as token_id:N (return_tokens_as_token_ids)"
            raise self._refused(rule, repr(self._shown(text)))
        return int(digits)

    def _shown(self, text: str) -> str:
        """Return the beginning of what a server sent, in one line and without the key."""
        without = text.replace(self.key, "[key]") if self.key else text
        return " ".join(without.split())[:SHOWN]

    def _refused(self, rule: str, got: str, remedy: str = "give another server") -> ValueError:
        return refusal("audit", rule, f"{self.url}: {got}", remedy)


def _key(variable: str) -> str:
    """Return the key in an environment variable. No message repeats what was given."""
    key = os.environ.get(variable, "")
    if not KEY.fullmatch(key):
        rule = "--api-key with the name of an environment variable that holds a key"
        got = "one with other characters than keys have" if key else "a name without one"
        raise refusal("audit", rule, got, "set the variable, and give its name")
    return key


def _checked(url: str) -> str:
    """Return a URL of a server; raise ValueError for another text."""
    try:
        parts = urllib.parse.urlsplit(url)
        known = bool(parts.hostname) and parts.port != 0 and parts.scheme in ("http", "https")
    except ValueError:  # of brackets or the port
        known = False
    plain = url.isascii() and url.isprintable() and not set(url) & set(" ?#@")
    if not known or not plain:
        got = "one with a user name" if "@" in url else repr(url)  # which may have a password
        rule = "--url with http:// or https://, a host in ASCII, and nothing behind its path"
        raise refusal("audit", rule, got, "give one such as http://127.0.0.1:8000")
    return url


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the log probabilities of logits [..,V] in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


class LogProbabilities:
    """A reference whose outputs are log probabilities."""

    def __init__(self, reference: Reference) -> None:
        self.reference, self.facts, self.model = reference, reference.facts, reference.model
        self.known: Dict[bytes, np.ndarray] = {}  # outputs [1,V] behind prompts

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs."""
        return log_probabilities(self.reference.outputs(tokens, start)).astype(np.float32)

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

    def changed(self, change: Callable[[Any], Any]) -> "LogProbabilities":
        """As Reference.changed."""
        return LogProbabilities(self.reference.changed(change))


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
            replies = self.server.complete(prompts, 1, self.reference.facts.width)
            for row, prompt, listed in zip(asked, prompts, replies, strict=True):
                if listed:
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
            try:
                parts.append(self.prefill(prompts[begin : begin + AT_ONCE]))
            except (graph.NotPossible, GraphError) as said:
                rule, got = "a server that reads prompts of one token", f"{self.server.url}: {said}"
                raise refusal("audit", rule, got, "correct its settings") from None
        actual = np.concatenate(parts)
        expected = np.stack([self.reference.behind(prompt) for prompt in prompts])
        known = actual[:, 0, -1] >= 0  # where the server listed a token
        error = SAFETY * worst_error(actual[known, :, :width], expected[known])
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
        width = self.reference.facts.width
        for row, listed in enumerate(self.server.complete(self.rows, GENERATED, width)):
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
        title=repeat.in_line(f"'{cell.name}', row {token.row}, token {token.index} of a sequence"),
        mark=repeat.MARK,
        authorized=AUTHORIZED.format(variable) if (variable := session.server.variable) else "",
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
