"""Softmax attention as a whole, recognized by its numbers, whatever its spelling.

Weights w are softmax(p) for some pairs p above them; p is scale s + bias, or
softcap tanh(scale s / softcap) + bias, for products s of queries and keys; the bias is what the
same operators give for s = 0. A bias of 0 and -inf is a rule of visibility where one is found.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from posenc_export import ops
from posenc_export.reading.axes import (
    FINE,
    HIDDEN,
    Roles,
    in_heads,
    is_plain,
    orders,
    same,
    scores_of,
    tokens,
)
from posenc_export.reading.lengths import ByPair, Call, Lengths, compared_pairs
from posenc_export.reading.properties import Properties
from posenc_export.reading.rotations import Rotations
from posenc_export.reading.steps import Attend, Cached, Each, OverKeys, Sinks, Step
from posenc_export.reading.values import LAYOUT, inputs_of, packet, zero_scores
from posenc_export.shared.places import evaluate, seen

FADED = 30  # scores that are smaller by so much have weights below rounding
LEAST = -1e30  # of a bias, since kernels add to it
SUMS = (1e-4, 1 - 1e-4)  # of the weights of a row beside a sink
COMPARED = 2048  # positions whose pairs are all compared with a rule of visibility
DENOMINATORS = range(1, 1025)
LARGER, FAR = (1.0, 16.0), 1e3  # sizes of scores that show whether their form holds for all


class Side(NamedTuple):
    """Queries, keys or values: a node and the order of its factors as [B, tokens, heads, D]."""

    node: Node
    order: tuple[int, ...]


class Form(NamedTuple):
    """Scores as a function of products: scale s, or softcap tanh(scale s / softcap)."""

    scale: float
    softcap: float


class Visibility(NamedTuple):
    """What queries see, as in ops.attention_mask; `is_rule` is False for other biases."""

    is_rule: bool
    before: int = -1
    after: int = 0
    chunk: int = 0


class Attentions:
    """Recognizes attention in a graph whose steps are being found.

    Args:
        properties: the steps found so far.
        lengths: plans of biases.
    """

    def __init__(self, properties: Properties, lengths: Lengths) -> None:
        self.properties, self.lengths, self.values = properties, lengths, properties.values
        self.rotations = Rotations(properties, lengths)
        self.counts = self.values.counts

    def recognize(self, node: Node, step: OverKeys) -> Step:
        """Return an Attend for the product of weights and values, or the step itself."""
        steps, of = self.properties.steps, self.values.of
        data = [
            (other, read)
            for other, read in zip(inputs_of(node), step.reads, strict=True)
            if read and self.values.kind[other] == "data"
        ]
        if step.fill != 0.0:
            return replace(step, undefined=max(self._undefined(*pair) for pair in data))
        if len(data) != 2:
            return step
        (w, w_roles), (v, v_roles) = sorted(data, key=lambda pair: -len(tokens(pair[1])))
        if set(tokens(w_roles)) != {"Q", "K"} or tokens(v_roles) != ["K"] or not is_plain(v_roles):
            return step
        weights = scores_of(of[w], w_roles, self.counts)
        softmax = None if weights is None else self._softmax(w, weights)
        if weights is None or softmax is None:
            return step
        p, sinks = softmax
        chain = self._chain(p)
        if chain is None:
            return step
        s, form = chain[0], self._form(chain, p)
        product = self._product(s)
        value = self._value(node, step.roles, weights, v, v_roles)
        if product is None or value is None or form is None:
            return step
        q, k, factor = product
        v_order, y_order = value
        roles = steps[p].roles
        bias, sees = None, Visibility(True, after=0 if self.properties.causal else -1)
        if len(chain) > 1:
            plan = self.lengths.pairs(self._added(chain), roles)
            sees = self._visibility(plan, roles)
            bias = None if sees.is_rule else plan
        key, cached = self._caches(k, Side(v, v_order))
        for side in (q, key):
            self.rotations.recognize(side.node)
        return Attend(
            step.roles, q.node, q.order, key, cached, y_order, weights.shape[1],
            form.scale * factor, form.softcap, bias, roles, sees.before, sees.after, sees.chunk,
            sinks,
        )  # fmt: skip

    def _undefined(self, p: Node, roles: Roles) -> float:
        """Return half of the largest score of a later key that the module hides by a finite number,
        where other data than products of queries and keys may hide all keys of a query, too.
        """
        scores = scores_of(self.values.of[p], roles, self.counts)
        if scores is None or not (self.properties.causal and is_plain(roles)):
            return -math.inf
        chain = self._chain(p)
        if chain is not None and self._is_product(chain[0]) and self._form(chain, p):
            return -math.inf
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        largest = float(scores[..., later].max())
        return largest / 2 if largest < -FADED else -math.inf

    # Weights and scores

    def _softmax(self, w: Node, weights: Tensor) -> tuple[Node, Sinks] | None:
        """Return the pairs whose softmax the weights are, and the sinks beside them."""
        for p in self._pairs_above(w):
            scores = scores_of(self.values.of[p], self.properties.steps[p].roles, self.counts)
            if scores is None or scores.shape != weights.shape or not scores.is_floating_point():
                continue
            is_softmax = same(torch.softmax(scores, -1), weights)
            sinks = None if is_softmax else self._sinks(scores, weights)
            found = is_softmax or sinks is not None
            if found and self._are_weights(w, p, scores.shape, sinks):
                return p, sinks
        return None

    def _are_weights(self, w: Node, p: Node, shape: torch.Size, sinks: Sinks) -> bool:
        """Return whether w is the softmax of any scores in the place of p, also of scores that are
        larger than those of the example, and depends on no other data.
        """
        steps, of = self.properties.steps, self.values.of
        region = [] if w is p else self.properties.between(p, w)
        if not self.values.memory.isdisjoint(region) or self.values.input in region:
            return False
        generator = torch.Generator().manual_seed(9)
        sinks = self.values.of[sinks].flatten() if isinstance(sinks, Node) else sinks
        for size in LARGER:
            drawn = size * torch.randn(of[p].shape, generator=generator)
            x = torch.where(of[p] > HIDDEN, drawn.to(of[p].dtype), of[p])
            own: Any = scores_of(x, steps[p].roles, self.counts)
            got = scores_of(self.properties.run_region(region, p, x), steps[w].roles, self.counts)
            if sinks is not None:
                beside = sinks[None, :, None, None].expand(*shape[:3], 1)
                own = torch.cat((own, beside), -1)
            expected = torch.softmax(own, -1)[..., : shape[-1]]
            if got is None or not same(got, torch.where(got.isfinite(), expected, got)):
                return False
        return True

    def _sinks(self, scores: Tensor, weights: Tensor) -> Sinks:
        """Return sinks [H] beside scores, found at the query of a head whose keys have nearest to
        half of the weight, as a weight of the module states them if one does.
        """
        shares, logarithms = (
            x.transpose(0, 1).flatten(1) for x in (weights.sum(-1), torch.logsumexp(scores, -1))
        )
        best = (shares - 0.5).abs().argmin(1, keepdim=True)
        share = shares.gather(1, best)
        if (share < SUMS[0]).any() or (share > SUMS[1]).any():
            return None
        sinks = (logarithms.gather(1, best) + torch.log(1 / share - 1))[:, 0]
        beside = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        if not same(torch.softmax(torch.cat((scores, beside), -1), -1)[..., :-1], weights):
            return None
        for node, constant in self.values.constants.items():
            if constant.numel() == sinks.numel() and constant.is_floating_point():
                if same(constant.flatten().to(sinks.dtype), sinks):
                    return node
        return sinks

    def _pairs_above(self, w: Node) -> list[Node]:
        """Return the pairs of data that w is computed from, first ones first."""
        found, left = set(), [w]
        while left:
            node = left.pop()
            step = self.properties.steps.get(node)
            if node in found or step is None or not isinstance(step.roles, tuple):
                continue
            if set(tokens(step.roles)) == {"Q", "K"}:
                found.add(node)
                left += inputs_of(node)
        return [node for node in self.values.nodes if node in found]

    def _chain(self, p: Node) -> list[Node] | None:
        """Return the nodes from the product of queries and keys to the scores p."""
        chain = [p]
        while not self._is_product(chain[0]):
            above = self.values.data_of(chain[0])
            if len(above) != 1 or not isinstance(self.properties.steps[chain[0]], Each):
                return None
            chain.insert(0, above[0])
        return chain

    def _is_product(self, s: Node) -> bool:
        """Return whether a node multiplies a value at queries with one at keys."""
        step = self.properties.steps[s]
        if not isinstance(step, Each) or isinstance(step.roles, list):
            return False
        read = zip(inputs_of(s), step.reads, strict=True)
        roles = [tokens(r) for other, r in read if r and self.values.kind[other] == "data"]
        return sorted(map(str, roles)) == ["['K']", "['Q']"]

    def _arranged(self, x: Tensor, roles: Roles, kind: str) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return x as [B, tokens, heads, entries] in every order of its constant factors."""
        found = orders(roles, kind)
        return [(order, in_heads(x, roles, order, self.counts)) for order in found]

    def _product(self, s: Node) -> tuple[Side, Side, float] | None:
        """Return queries and keys whose products in heads the scores are, and a factor."""
        step: Any = self.properties.steps[s]
        reads = {
            node: read
            for node, read in zip(inputs_of(s), step.reads, strict=True)
            if self.values.kind[node] == "data"
        }
        expected = scores_of(self.values.of[s], step.roles, self.counts)
        if expected is None or len(reads) != 2:
            return None
        q, k = sorted(reads, key=lambda node: tokens(reads[node]) == ["K"])
        heads = expected.shape[1]
        for q_order, queries in self._arranged(self.values.of[q], reads[q], "Q"):
            for k_order, keys in self._arranged(self.values.of[k], reads[k], "K"):
                if queries.shape[3] != keys.shape[3] or queries.shape[2] != heads:
                    continue
                if heads % keys.shape[2]:
                    continue
                repeated = keys.repeat_interleave(heads // keys.shape[2], 2)
                got = torch.einsum("bqhd,bkhd->bhqk", queries, repeated)
                factor = float((got * expected).sum() / (got * got).sum().clamp(min=1e-30))
                if same(got * factor, expected):
                    return Side(q, q_order), Side(k, k_order), simple(factor)
        return None

    def _value(
        self, node: Node, roles: Roles, weights: Tensor, v: Node, v_roles: Roles
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the orders of values and output in which weights times values give the output."""
        heads = weights.shape[1]
        for v_order, x in self._arranged(self.values.of[v], v_roles, "K"):
            if heads % x.shape[2]:
                continue
            repeated = x.repeat_interleave(heads // x.shape[2], 2)
            got = torch.einsum("bhqk,bkhd->bqhd", weights, repeated)
            for y_order, y in self._arranged(self.values.of[node], roles, "Q"):
                if same(got, y):
                    return v_order, y_order
        return None

    def _caches(self, k: Side, v: Side) -> tuple[Cached, Cached]:
        """Return keys and values to cache; of heads that are copies (grouped heads) one each."""
        of, varied = self.values.of, self.values.varied  # in which other heads are chosen
        keys, values, *others = (
            in_heads(known[n], self.properties.steps[n].roles, order, self.counts)
            for known in (of, varied)
            for n, order in (k, v)
            if n in known
        )
        most = max(keys.shape[2], values.shape[2])
        for kept in (count for count in range(1, most + 1) if most % count == 0):
            if all(_are_copies(x, kept) for x in (keys, values, *others)):
                break
        return self._cached(k, keys, kept), self._cached(v, values, kept)

    def _cached(self, side: Side, heads: Tensor, kept: int) -> Cached:
        """Return what to cache of keys or values [B,S,N,D], of which `kept` heads differ: the
        earliest value that is these heads in another layout.
        """
        copies = heads.shape[2] // kept
        chain, different = [side.node], heads[:, :, ::copies]
        while packet(chain[0]) in LAYOUT and len(above := self.values.data_of(chain[0])) == 1:
            chain.insert(0, above[0])
        for node in chain[:-1] if copies > 1 else ():
            roles = self.properties.steps[node].roles
            if tokens(roles) == ["Q"] and is_plain(roles):
                for order, x in self._arranged(self.values.of[node], roles, "Q"):
                    if x.shape == different.shape and torch.equal(x, different):
                        return Cached(node, order)
        return Cached(side.node, side.order, copies)

    # What is added to the scores

    def _form(self, chain: Sequence[Node], p: Node) -> Form | None:
        if len(chain) == 1:
            return Form(1.0, 0.0)
        x = self.values.of[chain[0]]

        def run(scores: Tensor) -> Tensor:  # the operators after the product
            return self.properties.run_region(chain[1:], chain[0], scores)

        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).to(x.dtype)
        at_zero, at_some = run(torch.zeros_like(x)), run(drawn)
        if at_zero.numel() != drawn.numel():
            return None
        some = drawn.reshape(at_zero.shape)  # if batch and heads were one axis
        seen = (at_zero > HIDDEN) & (some.abs() > 0.5)
        if not seen.any():
            return None
        change, some = (at_some - at_zero)[seen].double(), some[seen].double()
        scale = simple((change / some).median().item())
        if same(change, scale * some, FINE):  # and scores that are larger pass no bound
            larger = (run(FAR * drawn) - at_zero)[seen].double()
            return Form(scale, 0.0) if same(larger, FAR * scale * some, FINE) else None
        far = run(torch.full_like(x, 1e9)) - at_zero
        softcap = simple(far[seen].median().item())
        if not softcap > 0:
            return None
        bent = torch.atanh((change / softcap).clamp(-0.999, 0.999))
        scale = simple((softcap * bent / some).median().item())
        fits = same(change, softcap * torch.tanh(scale * some / softcap), FINE)
        return Form(scale, softcap) if fits else None

    def _added(self, chain: Sequence[Node]) -> Node:
        """Add the operators after the product to the graph, on scores of 0: what the module adds to
        its scores, which depends on the length alone.
        """
        values, graph = self.values, self.values.graph
        s = chain[0]
        with graph.inserting_after(chain[-1]):
            zero = graph.call_function(zero_scores, ([],))
        zero.meta = dict(s.meta)
        copies = {s: zero}
        values.kind[zero], values.of[zero] = "length", torch.zeros_like(values.of[s])
        for node in chain[1:]:
            with graph.inserting_before(values.end):
                copy = graph.node_copy(node, lambda other: copies.get(other, other))
            copy.meta, copies[node], values.kind[copy] = dict(node.meta), copy, "length"
            inputs = [values.of.get(other) for other in inputs_of(copy)]
            values.of[copy] = values.call(copy, inputs, self.counts)
        return copies[chain[-1]]

    def _visibility(self, plan: Any, roles: Roles) -> Visibility:
        """Return the rule that a bias is: everything, a window, chunks; or none."""
        count, after = self.lengths.count, 0 if self.properties.causal else -1
        every, first = torch.arange(count), torch.zeros(1, dtype=torch.int64)
        column = self._at(plan, roles, every, first)[0, :, 0]
        size = int((column == 0).sum())  # of the window or chunk from the first token on
        rules = [
            Visibility(True, after=after),
            Visibility(True, size - 1, 0 if after == 0 else size - 1),
        ]
        blocks = [(every[-1:], every), (first, every)]  # each distance
        if not (isinstance(plan, ByPair) and plan.by_distance):  # chunks are no function of it
            rules.append(Visibility(True, after=after, chunk=size))
            blocks += [(q[0], k[0]) for q, k in compared_pairs(count, count <= COMPARED)]
        for rule in rules:
            if all(self._agrees(rule, plan, roles, *block) for block in blocks):
                return rule
        return Visibility(False, after=after)

    def _agrees(self, rule: Visibility, plan: Any, roles: Roles, q: Tensor, k: Tensor) -> bool:
        """Return whether a bias at positions of queries and keys is 0 where a rule shows the key,
        and otherwise hides it.
        """
        places = {"q": q[:, None].numpy(), "k": k[None].numpy()}
        shown = evaluate(seen(rule.before, rule.after, rule.chunk), places)
        x, shown = self._at(plan, roles, q, k), torch.from_numpy(np.array(shown))
        agrees = torch.where(shown, x == 0, x < HIDDEN)
        later = k[None] > q[:, None]  # hidden in causal models, whatever their bias is
        return bool((agrees | later if self.properties.causal else agrees).all())

    def _at(self, plan: Any, roles: Roles, positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return what is added to scores at positions of queries [Q] and keys [K]: [1 or H,Q,K]."""
        call = Call(ops, positions[None], key_positions[None], self.lengths.count - 1)
        return self.lengths.scores(plan, roles, call)[0]


def _are_copies(x: Tensor, kept: int) -> bool:
    """Return whether heads [B,S,N,D] are `kept` heads, each repeated equally often."""
    if x.shape[2] % kept:
        return False
    copies = x.shape[2] // kept
    return torch.equal(x, x[:, :, ::copies].repeat_interleave(copies, 2))


def simple(number: float) -> float:
    """Return a number found by division as the simple one that it is within rounding: whole, or a
    quotient or root of whole numbers.
    """
    roots = (k / math.sqrt(d) for k in (1, 2) for d in DENOMINATORS)
    for candidate in (round(number), *roots, *(1 / d for d in DENOMINATORS)):
        if candidate and abs(number / candidate - 1) < 3e-6:
            return float(candidate)
    return number
