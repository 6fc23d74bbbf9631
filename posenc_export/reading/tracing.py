"""torch.export of modules as they are published: remedies are tried one after the other."""

import gc
import io
import itertools
import logging
import math
import os
import sys
import traceback
import warnings
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any, Callable, Iterator
from unittest import mock

import sympy
import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from posenc_export.reading.causality import LONGEST_EDGE, affordable
from posenc_export.reading.full_length import loops_over_tokens
from posenc_export.reading.joined import Joined, traced_at
from posenc_export.reading.recurrences import recurrences
from posenc_export.reading.refused import Refused, joined, place, place_of_error
from posenc_export.reading.whole import OneTensor, count_numbers, of_length
from posenc_export.shared.foreign import OTHERS_CODE

LOOP = 100  # tokens of an example for a module that loops over them
FIXED = (
    "specialized it to be a constant",
    "SymInt",
    "Constraints violated",
    "interpreted as an integer",
)
DATA = ("data-dependent", "Could not extract specialized integer")
# Remedies that a trace may need, as phrases.
RECURRENT = "recurrences as one operation with a state"
HASHED = "the length as key of a dict"
MIXED = "branches on mask.any() and mask.all() as for a mixed mask"
JOINED = "traces of several sizes joined"
STRICT = "traced by torch.export's strict mode"
WAYS: list[list[str]] = [  # in turn
    [RECURRENT], [], [HASHED], [MIXED], [JOINED], [MIXED, JOINED], [STRICT]
]  # fmt: skip
FOR = {HASHED: ("unhashable type",), MIXED: DATA}  # words of the errors that a remedy is for


@contextmanager
def _any_is_true() -> Iterator[None]:
    """Let Tensor.any() and torch.any(x) return True, and all() False. Branches that code skips for
    some inputs are then traced.
    """
    with ExitStack() as stack:
        for owner in (Tensor, torch):
            for name, taken in (("any", True), ("all", False)):
                own = getattr(owner, name)

                def reduced(
                    x: Tensor, *a: Any, _own: Any = own, _taken: bool = taken, **k: Any
                ) -> Any:
                    return _own(x, *a, **k) if a or k else _taken

                stack.enter_context(mock.patch.object(owner, name, reduced))
        yield


def _hashed(size: torch.SymInt) -> int:
    """Hash a size of a trace, as a key of a dict of that trace alone."""
    return hash((id(getattr(size.node, "shape_env", None)), size.node.expr))


LOOPS = (
    "loops over tokens, so that a trace holds for one length; write it as an operator on all tokens"
)
FIXES = (
    "fixes the length of its input in a trace; take it from the shape of a tensor, and compute with"
    " tensors"
)


def _joined(plain: OneTensor, x: Tensor) -> Joined:
    """Join traces at four sizes near that of x, or of fewer tokens if x takes too long."""
    longest = min(x.shape[1], affordable(count_numbers(plain.parameters()), LONGEST_EDGE))
    sizes = [(x.shape[0] + n % 4, longest - n) for n in (0, 1, 3, 6)]
    some = (x[torch.arange(rows) % x.shape[0], :length].clone() for rows, length in sizes)
    return Joined([traced_at(plain, plain.inputs(one)) for one in some], sizes)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as products, a mask and a softmax."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(seen.triu(1), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)


def added_products(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """baddbmm as a product and a sum, so that attention with such a product is recognized."""
    return torch.bmm(batch1, batch2) * alpha + input * beta


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """flex_attention as products. score_mod and mask_mod get all rows, heads, queries and keys at
    once. The sums and maxima that flex_attention also returns are not computed.
    """
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    places = [
        torch.arange(size).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(scores.shape)
    ]
    scores = score_mod(scores, *places)
    scores = scores.masked_fill(block_mask[-1](*places).logical_not(), -math.inf)
    return torch.matmul(torch.softmax(scores, -1), value), scores.new_zeros(0), scores.new_zeros(0)


@contextmanager
def short_traces(lines: bool = False) -> Iterator[None]:
    """Trace within the context without garbage collection and without torch's cache of shapes.

    A trace allocates millions of objects. The cache holds the shape and dtype of the output of each
    operator for its inputs; with dynamic sizes, its entries cost more time than they save. Strides
    are not recorded, and lines of code only if `lines` is True.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch._dynamo.config.patch(fake_tensor_cache_enabled=False))
            for owner, name, value in (
                (proxy_tensor, "_extract_tensor_metadata", lambda _: None),
                (torch.fx.config, "do_not_emit_stack_traces", not lines),
                (torch.fx.proxy.TracerBase, "_filter_traceback_frames", _own_frames),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield
    finally:
        if collects:
            gc.enable()


def _own_frames(_: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of forward methods, and those below the last one outside torch whose files
    are in its folder.
    """
    forward = [frame.name == "forward" for frame in frames]
    of_modules = list(itertools.compress(frames, forward))
    outside = [f for f in of_modules if not f.filename.startswith(OTHERS_CODE)]
    if outside:
        last, folder = frames.index(outside[-1]), os.path.dirname(outside[-1].filename)
        of_modules += [f for f in frames[last:] if os.path.dirname(f.filename) == folder]
    return traceback.StackSummary.from_list(of_modules)


@contextmanager
def quiet() -> Iterator[None]:
    """Trace within the context as generally as possible, without warnings and logs."""
    with ExitStack() as stack:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, level)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stderr(io.StringIO()))
        if flex := sys.modules.get("torch.nn.attention.flex_attention"):
            named: dict[str, Any] = {
                "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
                "flex_attention_hop": _flex,
            }
            stack.enter_context(mock.patch.multiple(flex, **named))
        stack.enter_context(torch.no_grad())
        stack.enter_context(short_traces(lines=True))
        yield


def exported(plain: OneTensor, x: Tensor, most: int) -> tuple[ExportedProgram, list[str]]:
    """Trace a module with free rows and tokens. Return the program and the remedies that it needed.

    The example is as long as possible, so that no branch for short lengths is taken. It is short if
    the module loops over tokens: a trace of each token takes long, and holds for one length.
    """
    first: Refused | None = None
    said = ""
    with quiet():
        loops = loops_over_tokens(plain, x, most)
    longest = min(most - 1, LOOP) if loops else most - 1
    for used in WAYS:
        if not all(any(word in said for word in FOR.get(remedy, ("",))) for remedy in used):
            continue
        try:
            return _attempt(plain, x, most, longest, used), used
        except Refused as error:
            if used != [RECURRENT]:  # if no recurrence was found, later ways report the error
                first, said = first or error, f"{said}{error.__cause__}"
                if LOOPS in str(first):
                    break
    raise first or AssertionError("one way traces the module as it is")


def _attempt(
    plain: OneTensor, x: Tensor, most: int, longest: int, used: list[str]
) -> ExportedProgram:
    copied = plain.copied()  # a trace may leave its values on it
    rows, length = _example_sizes(copied, longest)
    x = of_length(x[torch.arange(rows) % x.shape[0]], length).clone()
    free: Any = Dim.DYNAMIC
    sizes: list[dict[int, Any]] = [{0: free, 1: free}]
    if copied.argument is not None:
        of_rows = {axis: free for axis, size in enumerate(copied.before) if not size}
        sizes.append({**of_rows, len(copied.before): free})
    elif copied.memory is not None:
        sizes += [{0: free, 1: free}] * 2
    traced: nn.Module = copied
    with quiet(), ExitStack() as stack, _fixed_sizes(copied) as fixed:
        if MIXED in used:
            stack.enter_context(_any_is_true())
        if HASHED in used:
            stack.enter_context(mock.patch.object(torch.SymInt, "__hash__", _hashed))
        for owner, name, by in (
            (nn.functional, "scaled_dot_product_attention", attention),
            (torch, "baddbmm", added_products),
            (Tensor, "baddbmm", added_products),
        ):
            stack.enter_context(mock.patch.object(owner, name, by))
        try:
            if RECURRENT in used:
                traced = recurrences(copied, x, most)
            elif JOINED in used:
                traced = _joined(copied, x)
            return torch.export.export(
                traced, copied.inputs(x), dynamic_shapes=tuple(sizes), strict=STRICT in used
            )
        except Exception as error:
            raise _in_our_words(error, copied, fixed) from error


def _example_sizes(plain: OneTensor, most: int) -> tuple[int, int]:
    """Return rows and tokens of the example, different from all sizes of the module if possible."""
    taken: set[int] = {s for held in plain.state_dict().values() for s in held.shape}
    lengths = range(most, max(1, most - 4), -1)
    length = next((n for n in lengths if n not in taken), lengths[0])
    return next(n for n in (3, 5, 7, 11, 3) if n not in taken or n == 11), length


@contextmanager
def _fixed_sizes(plain: OneTensor) -> Iterator[list[tuple[sympy.Symbol, str, str]]]:
    """Record where the module's code fixes a size of the trace: symbol, layer, line."""
    found: list[tuple[sympy.Symbol, str, str]] = []
    own, layers = ShapeEnv._set_replacement, plain.layers()

    def noted(env: ShapeEnv, a: sympy.Symbol, to: sympy.Expr, why: str) -> None:
        if to.is_Integer:
            frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
            found.append((a, *place(frames, layers)))
        own(env, a, to, why)

    with mock.patch.object(ShapeEnv, "_set_replacement", noted):
        yield found


def _in_our_words(
    error: Exception, plain: OneTensor, fixed: list[tuple[sympy.Symbol, str, str]]
) -> Refused:
    """Translate an error of torch.export to a refusal with the layer and the line of code."""
    text = str(error)
    layer, line = place_of_error(error, plain.layers())
    if any(word in text for word in DATA):
        return Refused(
            joined(
                layer,
                "its control flow or a size depends on the data, which no trace follows; compute"
                " both branches and choose by torch.where, experts in a dense form",
                line,
            )
        )
    if fixed and any(word in text for word in FIXED):
        _, layer, line = fixed[0]
        code = line.partition(": ")[2]
        recurrent = isinstance(plain.module.get_submodule(layer), nn.RNNBase)
        loops = recurrent or code.startswith(("for ", "while "))
        why = LOOPS if loops else FIXES
        return Refused(joined(layer, why, line))
    said = " ".join(f"{type(error).__name__}: {text}".partition("\n\n")[0].split())[:200]
    return Refused(joined(layer, f"cannot be traced by torch.export: {said.rstrip(': ')}", line))
