"""The trace of a module on whole sequences: a graph of aten operators over any rows and tokens."""

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Iterator, Sequence

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Node

from posenc_export.reading import tracing
from posenc_export.reading.axes import same
from posenc_export.reading.causality import affordable, difference
from posenc_export.reading.full_length import called_at_full_length, own_error
from posenc_export.reading.graphs import clean, every_token, length_numbers, row_numbers, symbol_of
from posenc_export.reading.layers_once import LayersOnce
from posenc_export.reading.parts import whole_of
from posenc_export.reading.refused import Refused, naming
from posenc_export.reading.values import aten
from posenc_export.reading.whole import Capture, OneTensor, Path, of_length, private_copy

ROWS = 3
SOURCES = 13  # tokens of an encoder in examples
MOST_AXES = 8  # coordinates of a token
CHECKED = 20  # tokens of a row of the checks
FEW_COLUMNS = 8  # of a table whose largest and smallest rows are among the examples
OFTEN = 0.2  # of the tokens of a row are ids that the module compares its own with


def capture(
    module: nn.Module,
    example: Any,
    max_positions: int,
    *,
    positions: str | None = None,
    axes: int = 0,
    causal: bool = True,
    output: int | str | None = None,
    memory: int = 0,
) -> Capture:
    """Trace a module, which is not modified.

    Args:
        module: maps whole sequences.
        example: an input x, token ids [B,S] int64 or hidden states [B,S,E] float32, or (x,).
        max_positions: number of positions; the range is 0 .. max_positions - 1.
        positions: name of the argument of forward that takes positions, None if it has none.
        axes: number of coordinates of each token, if this argument takes them [axes,B,S].
        causal: whether outputs depend on no later tokens.
        output: key, attribute or index of the output, None for the first with an axis of tokens.
        memory: numbers of each token of an encoder, for a module forward(x, memory [B,M,memory],
            mask [B,M]) whose mask is 1 at tokens and 0 at padding; 0 for one that reads none.

    Raises:
        Refused: the module cannot be traced, gives no output [B,S,*], or differs from its trace.
    """
    with naming(f"module {type(module).__name__}"):
        x = _input(example, max_positions)
        _check_arguments(module, positions, axes, 2 if memory else 0)
        source = torch.randn(1, SOURCES, memory, generator=torch.Generator().manual_seed(2))
        own, remedies = private_copy(module), []
        if half := _half_precision(module):
            own = copy.deepcopy(own).float()
            x = x.float() if x.is_floating_point() else x
            remedies.append(f"computed in float32, with the same weights as in {half}")
        forms = ((axes, 0),) if axes else ((0,), ())
        plain = OneTensor(own, positions, forms[0], (), source if memory else None)
        plain = _one_tensor(plain, forms, output, x)
        untouched = plain.copied()
        plain = called_at_full_length(plain, x, max_positions)
        how = x, max_positions, remedies, causal
        layers = LayersOnce(plain.module, numbered=True) if not memory else None
        if layers and layers.templates:
            with contextlib.suppress(Refused):  # layers are not alike: the whole trace says why
                return _captured(plain, untouched, *how, layers)
        return _captured(plain, untouched, *how)


def _captured(
    plain: OneTensor,
    untouched: OneTensor,
    x: Tensor,
    most: int,
    remedies: list[str],
    causal: bool,
    layers: LayersOnce | None = None,
) -> Capture:
    """Trace a module. plain: after a call with as many tokens as it may get; untouched: before that
    call. layers: finds layers that are alike, which are traced once.
    """
    short = untouched
    if layers is not None:
        plain, short = plain.copied(), untouched.copied()
        for one in (plain, short):
            layers.pass_on(one.module)
        layers.guard_indices(plain.module)
    program, used = tracing.exported(plain, x, most)
    gives_last_token = every_token(program)
    cleaned = clean(program, gives_last_token)
    own, (first, *beside) = cleaned._asdict(), cleaned.inputs
    del own["inputs"]
    takes = plain.argument is not None
    known = inspect.signature(plain.module.forward).parameters.get(plain.argument or "")
    if takes and not beside[0].users and (known is None or known.default is not known.empty):
        got = f"{plain.argument!r}, which changes no output; leave it out"
        raise Refused(f"expected positions to name an argument with positions, got {got}")
    length = min(max(CHECKED, cleaned.least), most - 2)
    result = Capture(
        **own,
        where=f"module {type(plain.module).__name__}",
        input=first,
        positions=beside[0] if takes else None,
        memory=() if takes else tuple(beside),
        sources=None if plain.memory is None else symbol_of(beside[0].meta["val"].shape[1]),
        max_positions=most,
        lengths=length_numbers(cleaned.graph, first),
        batches=row_numbers(first, length),
        remedies=remedies + used + _regions(program, cleaned.least),
        gives_last_token=gives_last_token,
        example=_begun(_examples(x, cleaned, length), short, causal),
        causal=causal,
        module=short,
        copies=layers.templates if layers is not None else {},
    )
    _check_output(result)
    result = whole_of(result, untouched) if layers is not None else result
    _check_trace(result)
    return result


def _regions(program: torch.export.ExportedProgram, least: int) -> list[str]:
    """Return a phrase for each part of the module's code that the graph leaves out."""
    found = ["regions with autocast or gradients off are part of the graph"]
    if not any("wrap_with" in str(node.target) for node in program.graph.nodes):
        found = []
    return found + [f"traced as it computes {least} tokens and more"] * (least > 3)


def _input(example: Any, max_positions: int) -> Tensor:
    x = example[0] if isinstance(example, (tuple, list)) and len(example) == 1 else example
    axes = {False: 2, True: 3}
    if not isinstance(x, Tensor) or x.is_complex() or x.dim() != axes[x.is_floating_point()]:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise Refused(f"expected an example of ids [B,S] or of vectors [B,S,E], got {got}")
    if x.shape[0] == 0 or not 1 < x.shape[1] <= max_positions:
        raise Refused(
            f"expected an example of 2 to {max_positions} tokens, which is max_positions, got"
            f" {list(x.shape)}"
        )
    return x.detach().clone()


def _check_arguments(module: nn.Module, positions: str | None, axes: int, more: int) -> None:
    known = inspect.signature(module.forward).parameters
    if not 0 <= axes <= MOST_AXES:
        raise Refused(f"expected axes of 0 to {MOST_AXES}, got {axes}")
    if axes and positions is None:
        raise Refused(f"expected positions to name an argument for {axes} axes, got none")
    free = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if positions is not None and positions not in known and not free:
        raise Refused(
            f"expected positions to name an argument of forward {list(known)}, got {positions!r}"
        )
    needed = [
        name
        for name, p in known.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    missing = [name for name in needed[1 + more :] if name != positions]
    if missing:
        raise Refused(
            f"needs {', '.join(missing)} beside its input; write a module whose forward takes the"
            " input alone and gives it the rest"
        )


def _half_precision(module: nn.Module) -> str:
    kinds = {p.dtype for p in module.parameters()} & {torch.bfloat16, torch.float16}
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _one_tensor(
    plain: OneTensor, forms: Sequence[tuple[int, ...]], output: int | str | None, x: Tensor
) -> OneTensor:
    """Return the module with the place of its output, found in a call whose number of rows differs
    from that of tokens. forms: values to try for OneTensor.before.
    """
    rows = ROWS + (x.shape[1] == ROWS)
    x = x[torch.arange(rows) % x.shape[0]]
    for before in forms:
        plain.before = before
        try:
            with torch.no_grad():
                value = plain(*plain.inputs(x))
        except Exception as error:
            if plain.argument is None or before == forms[-1]:
                raise own_error(error, plain, x) from error
            continue
        plain.path = _path(value, x, output)
        return plain
    raise AssertionError("a call returns or raises")


def _path(value: Any, x: Tensor, output: int | str | None) -> Path:
    """Return the place of the first tensor with an axis of tokens, or else of one token."""
    found = every = dict(_tensors(value))
    if output is not None:
        found = {path: y for path, y in found.items() if path[:1] == (output,)}
        if isinstance(output, int) and isinstance(value, (list, tuple)) and output < 0:
            found = {(output,): value[output]}
    tokens = [p for p, y in found.items() if y.dim() > 2 and y.shape[:2] == x.shape[:2]]
    last = [
        p
        for p, y in found.items()
        if y.is_floating_point() and y.shape[:-1] in ((x.shape[0],), (x.shape[0], 1))
    ]
    if tokens or last:
        return (tokens + last)[0]
    shapes = ", ".join(" ".join(map(str, (*p, list(y.shape)))) for p, y in every.items())
    of = "no output" if output is None else f"no output {output!r}"
    raise Refused(
        f"has {of} with an axis of tokens in the place of its input's {list(x.shape)}, but"
        f" {shapes or f'a {type(value).__name__}'}; expected [B,S,*]"
    )


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors that a forward returned, with their places."""
    if isinstance(value, Tensor):
        yield path, value
        return
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif hasattr(value, "__dict__"):
        items = list(vars(value).items())
    for key, inner in items:
        if isinstance(inner, (Tensor, Mapping, list, tuple)) or dataclasses.is_dataclass(inner):
            yield from _tensors(inner, path + (key,))


def _examples(x: Tensor, cleaned: Any, length: int) -> Tensor:
    """Return inputs for checks by numbers: tokens that differ, with ids of all embedding rows."""
    g = torch.Generator().manual_seed(1)
    if x.is_floating_point():
        noise = torch.randn(ROWS, length, *x.shape[2:], generator=g)
        return (noise * x.std().clamp(min=0.1)).to(x.dtype)
    tables = _tables(cleaned)
    known = torch.arange(min(map(len, tables))) if tables else x.unique()
    if len(known) < 4:
        raise Refused(
            f"expected an example of tokens that differ, got {len(known)} kinds; what mixes equal"
            " tokens cannot be seen"
        )
    ids = known[torch.randint(len(known), (ROWS, length), generator=g)].to(x.dtype)
    few = [t.reshape(len(t), -1).double() for t in tables if t[0].numel() <= FEW_COLUMNS]
    rows = [n for t in few for n in (*t.argmin(0).tolist(), *t.argmax(0).tolist())]
    special = sorted(n for n in {*_compared(cleaned.inputs[0]), *rows} if n in known)
    if special:  # otherwise what they change, as a mask of padding, cannot be seen
        chosen = torch.tensor(special, dtype=x.dtype)[torch.arange(length) % len(special)]
        ids[:, 1:] = torch.where(torch.rand(ids.shape, generator=g) < OFTEN, chosen, ids)[:, 1:]
    return ids


def _tables(cleaned: Any) -> list[Tensor]:
    """Tables of which ids choose rows."""
    ids, found = cleaned.inputs[0], []
    for user in ids.users:
        chosen = {aten.embedding.default: [ids], aten.index.Tensor: [[ids]]}.get(user.target)
        if chosen == [*user.args[1:2]] and user.args[0] in cleaned.constants:
            found.append(cleaned.constants[user.args[0]])
    return found


def _compared(ids: Node) -> list[int]:
    """Return the ids that the module compares its input ids with."""
    aten = torch.ops.aten
    users = (user for user in ids.users if user.target in (aten.eq.Scalar, aten.ne.Scalar))
    return sorted({int(user.args[1]) for user in users if isinstance(user.args[1], int)})


def _begun(x: Tensor, plain: OneTensor, causal: bool) -> Tensor:
    """Begin no row with an id alone with which no output is finite, or the first one depends on
    later ids, as with one of padding. Such outputs are NaN in calls.
    """
    if x.is_floating_point():
        return x

    def begins(first: Tensor) -> Tensor:
        rows = [torch.cat((first[:, None], x[[i], 1:].expand(len(first), -1)), 1) for i in (0, 1)]
        y, z = (plain.copied().of(each) for each in rows)
        good = y.flatten(1).isfinite().all(1)
        if causal and y.shape[:2] == rows[0].shape:
            near = 1e-4 * y.nan_to_num().abs().max()
            good &= ((y - z)[:, 0].abs().flatten(1) <= near).all(1)
        return good

    if begins(x[:, 0]).all():
        return x
    known = x.unique()
    kept, first = known[begins(known)], x[:, :1]
    first = first if not len(kept) else torch.where(torch.isin(first, kept), first, kept[:1])
    return torch.cat((first, x[:, 1:]), 1)


def _check_output(result: Capture) -> None:
    shape = result.output.meta["val"].shape
    got = [sympy.sympify(s.node.expr if isinstance(s, torch.SymInt) else s) for s in shape]
    if len(got) < 3 or got[:2] != [result.rows, result.tokens]:
        named = {result.rows: sympy.Symbol("B"), result.tokens: sympy.Symbol("S")}
        raise Refused(
            f"gives an output {[s.subs(named) for s in got]} without an axis of tokens in its"
            " place; expected [B,S,*]"
        )


def _check_trace(result: Capture) -> None:
    """Raise Refused unless the graph gives the numbers of the module, also at lengths that were not
    traced. `findings` reports a module whose numbers differ from call to call.
    """
    most = affordable(3 * result.weights, min(result.max_positions, 300))
    short = max(result.least, min(CHECKED - 3, most - 1))
    for length in sorted({most, short}):  # rows are compared in calls of few tokens
        x = of_length(result.example[: ROWS if length == short else 1], length)
        drawn = result.drawn(len(x), length)
        want = result.own(x, beside=drawn)
        try:
            got = result.traced(x, drawn)[:, -want.shape[1] :]
        except (RuntimeError, IndexError) as error:
            said = str(error).partition("\n")[0]
            raise Refused(f"its trace holds for some lengths only; at {length}: {said}") from error
        if not same(got, want) and torch.equal(want, result.own(x, True, drawn)):
            off = difference(got, want)
            raise Refused(f"its trace differs from it by {off:.1e} at {length} tokens")
