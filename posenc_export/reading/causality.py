"""Whether a module is a function of each token and those before, by numbers on the module."""

import bisect
from typing import Any, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from posenc_export.reading.axes import Counts, Roles, factors, kinds, same, split
from posenc_export.reading.refused import joined, line_of, operator_of, refuse
from posenc_export.reading.steps import Cut, Running, Step, Window
from posenc_export.reading.values import Values, depending
from posenc_export.reading.whole import Capture, of_length

LONGEST = 256  # tokens of a probe
MOST_TOKENS = 2**16  # of a batch at a number that rows are compared with
LONGEST_EDGE = 4096  # of one at a number that a length is compared with
WORK = 1e11  # weights times tokens of such a probe; others together take about as much
NO_WEIGHT = 1e-27  # a factor of a value that is nothing in sums, also in float64
FADED = -64  # a score whose exponential is nothing in sums


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference: infinity if one number is finite and the other is not."""
    if a.shape != b.shape:
        return float("inf")
    off = (a - b).abs()
    off[(a == b) | (a.isnan() & b.isnan())] = 0
    return float(off.nan_to_num(nan=float("inf")).max()) if off.numel() else 0.0


def findings(capture: Capture) -> list[str]:
    """Return a phrase for each fault that prevents computing the module in calls: rows act on each
    other, later tokens on earlier ones, or outputs depend on more than tokens and positions.
    """
    x = capture.example
    if not capture.own(x).isfinite().all():
        return ["its output for random tokens is not finite, so that nothing can be checked"]
    if not capture.gives_last_token:  # of such a module, the graph is compared
        capture = capture.short or capture
    y = capture.own(x)
    if not torch.equal(y, capture.own(x)) or not same(y, capture.own(x, fresh=True)):
        drawn = [joined("", operator_of(n), line_of(n)) for n in capture.graph.nodes if _random(n)]
        by = f"random numbers by {drawn[0]}" if drawn else "random numbers, or a state of its own"
        return [f"gives other numbers in a second call with the same input: {by}"]
    found = _rows(capture, x, y)
    every = [*range(1, x.shape[1])] if capture.causal else []
    of_lengths, tried = _lengths(capture, every)
    # An output that is the same without the later tokens depends on none of them.
    if capture.causal and not found and (of_lengths or not tried.issuperset(every)):
        found += _later_tokens(capture, x)
    return found + of_lengths


def _random(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and node.args[2:] != (
        False,
    )  # dropout in eval


def _rows(capture: Capture, x: Tensor, y: Tensor) -> list[str]:
    alone = [capture.own(x[i : i + 1]) for i in range(len(x))]
    apart = torch.cat(alone)
    off = difference(apart, y)
    for count in capture.batches:
        if count * x.shape[1] <= affordable(capture.weights, MOST_TOKENS):
            many = capture.own(x[torch.arange(count) % len(x)])[: len(x)]
            if not same(many, y[:count]):
                off = difference(many, y[:count])
                return [f"depends on the number of rows: of {count}, one differs by {off:.1e}"]
    if same(apart, y):
        return []
    return [f"lets rows act on each other: a row alone and in a batch differ by {off:.1e}"]


def _changed(x: Tensor) -> Tensor:
    """Return tokens that differ from those of x [1,S,...] at every place."""
    if x.is_floating_point():
        return x.flip(1) * 0.7 - 0.3 * x.std()
    known = x.unique()
    return known[(torch.searchsorted(known, x) + 1) % len(known)]


def _later_tokens(capture: Capture, x: Tensor) -> list[str]:
    """Return a phrase if later tokens change earlier outputs. Tokens are changed from each place on
    at the length of the examples, and from some places on in a longer sequence.
    """
    found = []
    longest = _longest(capture)
    some = {1, longest // 3, longest // 2, longest // 2 + 1, longest - 2, longest - 1}
    for length, cuts in ((x.shape[1], range(1, x.shape[1])), (longest, sorted(some))):
        row = of_length(x[:1], length)
        later = _changed(row)
        rows = [torch.cat((row[:, :cut], later[:, cut:]), 1) for cut in cuts]
        y = capture.whole(row)
        many = torch.cat([capture.whole(rows_of) for rows_of in torch.cat(rows).split(8)])
        leaks = [(difference(many[i : i + 1, :cut], y[:, :cut]), cut) for i, cut in enumerate(cuts)]
        worst, cut = max(leaks)
        if worst > 1e-5 * max(1e-3, float(y.abs().max())):
            found.append(
                f"is not causal: tokens from {cut} on change earlier outputs by {worst:.1e}"
                f" of {float(y.abs().max()):.2g}"
            )
            break
    return found


def refuse_seen_later_keys(values: Values, steps: Mapping[Node, Step]) -> None:
    """Refuse a trace whose output depends on numbers of later keys, however rare the tokens are
    that show it. The trace is run again with other numbers at pairs of a query and a later key,
    all of them and the first ones alone; a causal mask, before or after, hides these.

    Args:
        steps: of the nodes that depend on tokens.
    """
    pairs = [
        node
        for node, step in steps.items()
        if isinstance(step.roles, tuple) and {"B", "Q", "K"} <= set(kinds(step.roles))
    ]
    of_order = [n for n in values.nodes if isinstance(steps.get(n), (Cut, Running, Window))]
    of_order += [n for n, kind in values.kind.items() if kind == "length"]
    ordered = depending(values.graph, of_order)  # others cannot hide a later key

    def differs(changed: Collection[Node]) -> bool:
        def with_others(node: Node, x: Any) -> Any:
            if node not in changed:
                return x
            return _with_others(x, steps[node].roles, values.counts, node in ordered)

        return not same(values.evaluate(with_others)[values.out], values.of[values.out])

    for some in (pairs, [n for n in pairs if set(pairs).isdisjoint(n.all_input_nodes)]):
        if differs(some):
            counts = range(1, len(some) + 1)
            first = bisect.bisect_left(counts, True, key=lambda count: differs(some[:count]))
            refuse(
                some[first],
                "computes numbers of later keys, which no causal mask hides; add a mask, or read "
                "an encoder with causal=False",
            )


def _with_others(x: Tensor, roles: Roles, counts: Counts, may_hide: bool) -> Tensor:
    """Return pairs of tokens in which numbers of later keys are those of earlier keys of the same
    query, and the opposite of bools. may_hide: numbers that are hidden stay, and those that are
    equal in all rows, which tokens do not change.
    """
    y = split(x, roles, counts).clone()
    axes = [kinds(roles).index(kind) for kind in ("B", "Q", "K")]
    query, key = (factors(roles)[axis] for axis in axes[1:])
    n = torch.arange(counts["Q"])
    of_tokens = y.movedim(axes, (0, -2, -1))
    of_tokens = of_tokens[..., query.left :, key.left :][..., : len(n), : len(n)]
    changed = n > n[:, None]
    if may_hide:
        changed = changed & (of_tokens != of_tokens[:1]).any(0)
        if x.is_floating_point():
            shown = (of_tokens > FADED) & (of_tokens.abs() > NO_WEIGHT) & of_tokens.isfinite()
            changed = changed & shown
    others = of_tokens.gather(-1, (n % (n[:, None] + 1)).expand(of_tokens.shape))
    if x.dtype == torch.bool:
        others = ~of_tokens
    of_tokens.copy_(torch.where(changed, others, of_tokens))
    return y.reshape(x.shape)


def affordable(weights: int, most: int) -> int:
    """Return the longest sequence that a module of so many weights reads within seconds."""
    return min(most, max(24, int(WORK / max(1, weights))))


def _longest(capture: Capture) -> int:
    return affordable(20 * capture.weights, min(capture.max_positions, LONGEST))


def probes(capture: Capture) -> list[int]:
    """Return lengths at which a module is compared with its output for more tokens: powers of two,
    and both sides of every number that it compares a length with.
    """
    most = capture.max_positions
    longest = _longest(capture)
    lengths = {2**i for i in range(1, 20)} | {3, 5, 13, longest // 3, longest - 1}
    lengths = {n for n in lengths if n < longest} | {longest}
    near = {n + i for n in capture.lengths if n < most - 1 for i in (-1, 0, 1)}
    near |= {capture.least + i for i in (-2, -1, 0, 1)}
    reach = max(longest, affordable(capture.weights, min(most, LONGEST_EDGE)))
    return sorted(n for n in lengths | near if 0 < n <= reach)


def same_at_every_length(capture: Capture) -> bool:
    """Return whether the output for max_positions tokens begins with that for fewer; False if so
    many take too long.
    """
    most = capture.max_positions
    if most > affordable(capture.weights, LONGEST_EDGE):
        return False
    x = of_length(capture.example[:1], most)
    whole = capture.whole(x)
    shorter = [n for n in (most - 1, most // 2, most // 3, 5) if n >= capture.least]
    return all(same(capture.own(x[:, :n])[:, -1], whole[:, n - 1]) for n in shorter)


def _lengths(capture: Capture, more: Sequence[int]) -> tuple[list[str], set[int]]:
    """Compare outputs of the first n tokens alone with those of a whole sequence, for n in probes
    and `more`. Return a phrase for each fault, and the lengths that the module takes.
    """
    lengths = sorted({*probes(capture), *more})
    x = of_length(capture.example[:1], lengths[-1])
    whole = capture.whole(x)
    worst, at, tried = 0.0, 0, set[int]()
    for length in lengths if capture.gives_last_token else lengths[:-1]:
        try:
            y = capture.own(x[:, :length])
        except Exception as error:  # whatever forward raises; it may refuse short sequences
            if length > capture.least:
                return [f"raises {type(error).__name__} at {length} tokens: {error}"], tried
            continue
        tried.add(length)
        want = whole[:, length - y.shape[1] : length] if capture.causal else y
        if not y.isfinite().all():
            return [f"its output is not finite at {length} tokens"], tried
        off = difference(y, want)
        if off > worst:
            worst, at = off, length
    if worst > 2e-5 * max(1e-3, float(whole.abs().max())):
        branch = f" (it has a branch at {capture.least} tokens)" if capture.least > 3 else ""
        said = (
            f"depends on the length: its output for {at} tokens differs from the beginning of that"
            f" for {lengths[-1]} by {worst:.1e}{branch}"
        )
        return [said], tried
    if len(tried) < 3:
        return [f"could be called at {len(tried)} of {len(lengths)} lengths only"], tried
    return [], tried
