"""Claims on the values that leave the integer part of a graph, which the solver z3 proves for any
call (any_call.py). What layers and encodings declare of positions is in the manifest.

Shapes: B rows, S new tokens, T keys of a call, R requested tokens, H heads.
"""

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

import z3

from posenc_export.runtime.artefact.records import Places
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.graphs.onnx_files import load_errors
from posenc_export.runtime.verification import described
from posenc_export.runtime.verification.any_call import AnyCall
from posenc_export.runtime.verification.integer_graph import Findings, IntegerPart, Use, evaluated
from posenc_export.runtime.verification.operators import OPERATORS
from posenc_export.runtime.verification.symbolic import (
    HIDDEN,
    MALFORMED,
    Score,
    Tensor,
    Translation,
    Untranslated,
    both,
    either,
    negated,
    real,
    reason_of,
    truth,
)
from posenc_export.shared.numerics import FINE, LEVELS

Rule = tuple[str, bool]  # a rule, and whether slots count from the first token of a window
POSITIONS = ("max(q, 0)", "slot")
# By operator and input that read a value: names that it must have one of (AnyCall.named).
STRICT: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("RotaryEmbedding", 3): POSITIONS,
    ("TensorScatter", 2): ("first",),
    ("GroupQueryAttention", 5): ("last",),
    ("GroupQueryAttention", 6): ("longest",),
    ("GroupQueryAttention", 9): ("slot",),
    (OPERATOR, 5): ("last",),
    (OPERATOR, 9): ("q",),
    (OPERATOR, 15): ("slot",),
    ("output present_positions", -1): ("k",),
    ("GatherND", 1): ("requested",),
    # Of torch (torch_graph.py): rows and slots that are written
    ("index_put_", 1): ("row",),
    ("index_put_", 2): ("slot",),
    ("index_copy_", 2): ("slot",),
}
# Inputs that count from the first token of a cache
IN_CACHES = {("GroupQueryAttention", 5), ("GroupQueryAttention", 6), ("TensorScatter", 2)}
IN_CACHES |= {(OPERATOR, 5), (OPERATOR, 15)}
# Axes of values by their names in rules; other names have the axes of q.
AXES = {"k": "bt", "x": "abs", "requested": "br", "longest": ""}
AXES |= dict.fromkeys(("row", "first", "last", "largest"), "b")
NAME = re.compile(r"[a-z]\w*")
UNKNOWN = "?"  # an axis of a size that no rule knows, such as the blocks of a call
MASKS = (("Attention", 3), ("GroupQueryAttention", 10), (OPERATOR, 10))
BY_SLOT = ("GroupQueryAttention", OPERATOR)  # operators that hide keys by slot, without a mask
UNWANTED = ("is_causal", "smooth_softmax")  # attributes that hide keys in another way
SIZES = ("Reshape", "Expand", "Slice", "ConstantOfShape", "Pad", "Range", "Tile")
OPEN = "not proved: "  # begins the reason why a claim is not decided
PICKS = "GatherElements"  # picks a score by a row index for each pair
INTEGERS = (6, 7)  # TensorProto.DataType of int32 and int64
# By TensorProto.DataType: least whole number that a cast to this type may change.
EXACT = {1: 1 << 24, 6: 1 << 31, 10: 1 << 11, 16: 1 << 8}


@dataclass(frozen=True)
class Value:
    """A value of a graph at any index."""

    name: str  # in the graph
    place: str  # name in the certificate
    axes: tuple[str, ...]  # the meaning of each axis: b, s, t, r, a size, or UNKNOWN
    index: list[Any]  # an integer of z3 for each axis
    entry: Any
    inside: list[Any]  # facts: the index is within the value
    in_windows: bool  # whether its keys are those in caches of windows
    sinks: bool = False  # whether a column of sinks precedes its keys

    @property
    def of_pairs(self) -> bool:
        """Whether it has an entry for each query and key."""
        return "s" in self.axes and "t" in self.axes

    @property
    def hides(self) -> bool:
        """Whether it has scores of -inf."""
        return isinstance(self.entry, Score) and self.entry.hidden is not False


class Claims:
    """Proves claims on the values that leave the integer part of a graph.

    Args:
        part: of a graph.
        call: of its artefact, whose manifest declares `places`.
        folder: of the external data of the graph.
        findings: gets proved, refuted and undecided claims.

    Raises:
        OSError: constants cannot be read.
    """

    def __init__(self, part: IntegerPart, call: AnyCall, folder: Path, findings: Findings) -> None:
        self.part, self.call, self.manifest, self.folder = part, call, call.manifest, folder
        self.findings, self.solver = findings, call.solver
        self.places, self.causal = self.manifest.places or Places(), described.causal(self.manifest)
        stored = part.graph.constants
        self.values = Translation(
            dict(call.tensors), stored, folder, call.sums, self.solver, OPERATORS
        )
        for name, embedded in part.free.items():
            self.values.reasons[name] = "depends on the shape of a computed value"
            if embedded:
                shape = (call.rows, call.columns, 1)
                self.values.tensors[name] = Tensor(shape, lambda index: 0)
        self.values.run(part.nodes)

    def prove(self) -> None:
        """Prove the claims on all values that leave the part."""
        for name in dict.fromkeys((*self.part.uses, *self.part.tables)):
            uses, place = self.part.uses.get(name, []), self._place(name)
            if uses and all(use.operator in SIZES for use in uses):
                self.findings.skipped[place] = "a size"
                continue
            try:
                value = self._value(name, place)
                for table in self.part.tables.get(name, []):
                    self._of_table(value, table)
                self._of_value(value, uses)
            except MALFORMED as reason:
                keys = {(use.operator, use.input) for use in uses}
                claimed = keys & (STRICT.keys() | {*MASKS}) or name in self.part.tables
                self.findings.skipped[place] = f"{OPEN if claimed else ''}{reason_of(reason)}"
        self._of_attention()
        self._of_casts()
        q, k = self.call.rule("q"), self.call.rule("k")
        try:  # all claims hold if there is no call
            if self.solver.excludes(*self._pair(False).inside, q >= 0, k >= 0, k <= q):
                self.findings.failures["calls"] = "expected a call with a key to see, got none"
        except Untranslated as reason:
            self.findings.skipped["calls"] = f"{OPEN}{reason}"

    def _pair(self, in_windows: bool) -> Value:
        """Return the mask of attention without one: it shows each key to each query."""
        call, keys = self.call, self.call.windows if in_windows else self.call.keys
        index, sizes = [call.row, call.column, call.slot], (call.rows, call.columns, keys.count)
        inside = [z3.And(i >= 0, i < size) for i, size in zip(index, sizes, strict=True)]
        place = "attention without a mask"
        return Value("", place, ("b", "s", "t"), index, True, inside, in_windows)

    def _of_attention(self) -> None:
        """Prove which keys attention without a mask shows."""
        layers: dict[bool, list[int]] = {False: [], True: []}  # without and with caches of windows
        for node, layer in self.part.attention:
            for name in filter(node.attributes.get, UNWANTED):
                self.findings.failures[f"{node.operator} of layer {layer}"] = f"expected no {name}"
            if node.operator in BY_SLOT and not any(node.inputs[10:11]):
                layers[self._windowed(layer)].append(layer)
        for in_windows, own in layers.items():
            value = self._pair(in_windows)
            try:
                self._of_mask(value, own)
            except MALFORMED as reason:
                self.findings.skipped[value.place] = f"{OPEN}{reason_of(reason)}"

    def _place(self, name: str) -> str:
        """Return the name of a value in the certificate, with the node that reads it."""
        use = next(iter(self.part.uses.get(name, [])), Use("Gather", 1))
        reader = use.operator if use.input < 0 else f"{use.operator} input {use.input}"
        return f"{name} ({reader})"[:128]

    def _value(self, name: str, place: str) -> Value:
        tensor, call = self.values.get(name), self.call
        axes: list[str] = []
        for size in tensor.shape:
            axes.append(self._letter(size, axes))
        if "t" in axes:  # only tokens have coordinates, keys have not
            sizes = zip(axes, tensor.shape, strict=True)
            axes = [str(size) if axis == "a" else axis for axis, size in sizes]
        windowed, sinks = not {"w", "w+"}.isdisjoint(axes), not {"t+", "w+"}.isdisjoint(axes)
        axes = ["t" if axis in ("w", "t+", "w+") else axis for axis in axes]
        names: dict[str, Any] = {"b": call.row, "s": call.column, "r": call.token, "1": 0}
        names["t"] = call.slot + 1 if sinks else call.slot
        if "a" in axes:
            names["a"] = call.plane
        index = [names.get(axis, z3.Int(f"axis {n}")) for n, axis in enumerate(axes)]
        pairs = zip(index, tensor.shape, strict=True)
        inside = [z3.And(i >= 0, i < size) for i, size in pairs if not isinstance(i, int)]
        return Value(name, place, tuple(axes), index, tensor.at(index), inside, windowed, sinks)

    def _letter(self, size: Any, before: Sequence[str]) -> str:
        """Return the meaning of an axis by its size. Tokens are tried before keys."""
        call, axes = self.call, self.manifest.axes
        if isinstance(size, int):
            return "a" if axes and size in (axes, axes + 1) and "a" not in before else str(size)
        sizes = {"b": call.rows, "s": call.columns, "t": call.keys.count}
        sizes |= {"w": call.windows.count, "r": call.requested_count}
        sizes |= {"t+": call.keys.count + 1, "w+": call.windows.count + 1}
        for letter, known in sizes.items():
            if letter not in before and self.solver.equal(size, known):
                return letter
        return UNKNOWN

    def _of_value(self, value: Value, uses: Sequence[Use]) -> None:
        keys = {(use.operator, use.input): use for use in uses}
        if value.of_pairs and (value.hides or any(key in MASKS for key in keys)):
            layers = sorted({use.layer for use in uses if use.layer >= 0})
            self._of_mask(value, layers or [0])
        elif isinstance(value.entry, (Score, float)):
            if uses:
                self.findings.skipped[value.place] = "numbers computed from positions"
        elif strict := [key for key in keys if key in STRICT and self._strict(value, keys[key])]:
            use = keys[strict[0]]
            if use.starts:  # the index counts from the first slot of a slice
                before = [*value.inside, value.entry < 0]
                if (model := self.call.smallest(*before)) is not None:
                    text = f"expected a slot of a slice, got {model.eval(value.entry, True)}"
                    text += f"; {self._described(model, value)}"
                    return self._refuted(value, value.entry, text, before)
                first = self.values.get(use.starts).at((0,))
                value = replace(value, entry=value.entry + first)
            windowed = strict[0] in IN_CACHES and self._windowed(use.layer)
            self._follows(value, [(rule, windowed) for rule in STRICT[strict[0]]])
        elif "r" in value.axes:
            self._follows(value, [("requested", False)])
        elif uses:
            declared = self._declared(self.part.layers_after(value.name), value.of_pairs)
            picks = value.of_pairs and any(use.operator == PICKS for use in uses)
            self._identified(value, declared if picks else [])

    def _strict(self, value: Value, use: Use) -> bool:
        """Return whether STRICT holds for a use: TensorScatter also writes to other values than
        caches, and GatherND also reads other tokens than the requested ones.
        """
        if use.operator == "GatherND":
            return "r" in value.axes
        return use.on_state or use.operator != "TensorScatter"

    def _windowed(self, layer: int) -> bool:
        past = f"past_key_values.{layer}.key"
        return any(state.window and state.past == past for state in self.manifest.states)

    def _declared(self, layers: Sequence[int], of_pairs: bool) -> list[str]:
        """Return the rules that encodings of tokens and of some layers declare for rows of tables;
        those of all layers if `layers` is empty. of_pairs: rules of a query and a key.
        """
        chosen = [rules for _, rules in self._layers(layers)]
        rules = dict.fromkeys([*(rule for of in chosen for rule in of), *self.places.tokens])
        return [rule for rule in rules if ("k" in words(rule)) == of_pairs]

    def _layers(self, layers: Sequence[int]) -> list[tuple[int, Sequence[str]]]:
        """Return some layers with the rules of rows that they declare; all if `layers` is empty."""
        known: list[tuple[int, Sequence[str]]] = [*enumerate(self.places.rows)]
        return [pair for pair in known if pair[0] in layers] or known

    def _silent(self, layers: Sequence[int]) -> bool:
        """Return whether an encoding without declared rows may read a table: tokens or a layer have
        several encodings, or declare no rows at all.
        """
        if described.is_read(self.manifest):
            return False
        of_layers = described.attentions(self.manifest)
        pairs = [(of_layers[layer]["encodings"], rows) for layer, rows in self._layers(layers)]
        pairs.append((described.of_tokens(self.manifest), self.places.tokens))
        return any(len(encodings) > 1 or (encodings and not rows) for encodings, rows in pairs)

    def _of_table(self, value: Value, table: str) -> None:
        """Prove which row of a table is read, and that the table has it."""
        stored, index = self.part.graph.constants.get(table), value.entry
        rows = ((stored or self.values.get(table)).shape or (1,))[0]
        of_table = replace(value, place=f"{value.place} of {table}"[:128])
        if isinstance(index, Score):
            raise Untranslated("an index that is no integer")
        if not isinstance(index, int):
            facts = [*value.inside, z3.Or(index < -rows, index >= rows)]
            if (model := self.call.smallest(*facts)) is not None:
                got, at = model.eval(index, True), self._described(model, value)
                text = f"expected a row of {rows}, got row {got}; {at}"
                self._refuted(of_table, index, text, facts)
                return
            self.findings.compared += 1
        if rows == 1:  # nothing is left to prove
            return
        readers = self.part.layers_after(value.name)
        rules = self._declared(readers, value.of_pairs)
        long = rows >= self.manifest.max_positions and not self.manifest.packages
        of_one = long and not value.of_pairs and UNKNOWN not in value.axes
        if of_one and (not rules or self._silent(readers)):
            rules = [*rules, *self._positions(value.axes)]
        if (level := table.rpartition(".")[2]) in LEVELS:
            of = "//" if level == LEVELS[0] else "%"
            rules = [f"({rule}) {of} {FINE}" for rule in rules or self._positions(value.axes)]
        self._identified(of_table, rules)

    def _positions(self, axes: Sequence[str]) -> list[str]:
        """Return the rules for an index, with its axes, of a table by position or coordinate."""
        if {"s", "t"}.isdisjoint(axes):
            return ["max(largest, 0)"]
        coordinates = [f"x{axis}" for axis in range(self.manifest.axes)]
        return [*POSITIONS, *coordinates, *(["x"] if coordinates else [])]

    def _identified(self, value: Value, rules: Sequence[str]) -> None:
        """Prove that a value follows one of some rules, if there are any."""
        if rules:
            self._follows(value, [(rule, value.in_windows) for rule in rules])
        else:
            self.findings.skipped[value.place] = "no rule is declared for it"

    def _follows(self, value: Value, rules: Sequence[Rule]) -> None:
        """Prove that a value follows one of some rules; record a counterexample if not."""
        if UNKNOWN in value.axes:
            raise Untranslated("an axis of a size that no rule knows")
        where, known = self._where(value), self._expected(value, rules)
        for _, expected in known:
            if self.solver.excludes(*where, differ(value.entry, expected)):
                self.findings.compared += 1
                return
        text, refuted = f"expected {' or '.join(rule for rule, _ in rules)}, got other axes", ()
        for rule, expected in known[:1]:
            refuted = (*where, differ(value.entry, expected))
            if (model := self.call.smallest(*refuted)) is not None:
                wanted, got = model.eval(expected, True), model.eval(value.entry, True)
                text = f"expected {rule} = {wanted}, got {got}; {self._described(model, value)}"
        self._refuted(value, value.entry, text, refuted)

    def _expected(self, value: Value, rules: Sequence[Rule]) -> list[tuple[str, Any]]:
        """Return rules with their values, if a value has their axes. Rules of tokens may also hold
        for keys. Without a cache, axes of queries and keys have one size, so that a rule of pairs
        may hold with both exchanged.
        """
        found, axes = [], set(value.axes)
        for rule, windowed in rules:
            names = words(rule)
            needed = {axis for name in names for axis in AXES.get(name, "bs")}
            of_tokens = "q" in names and "k" not in names and "t" in axes and "s" not in axes
            if needed - {"b"} <= axes:
                found.append((rule, self.call.rule(rule, windowed)))
            if of_tokens or (value.of_pairs and not self.call.caches):
                found.append((rule, self.call.rule(rule, windowed, of_keys=True)))
        return [(rule, of) for rule, of in found if is_truth(of) == is_truth(value.entry)]

    def _where(self, value: Value) -> list[Any]:
        """Return facts that claims on a value assume: the index is within the value. For pairs, the
        query may see the key. For keys, the row has a query.
        """
        if not value.of_pairs:
            read = self.call.caches and not self.call.by_mask and "t" in value.axes
            return [*value.inside, self.call.new(self.call.row) > 0] if read else value.inside
        q, k = (self.call.rule(name, value.in_windows) for name in "qk")
        before = [k <= q] if self.causal else []
        return [*value.inside, self.call.slot >= 0, q >= 0, k >= 0, *before]

    def _refuted(self, value: Value, claimed: Any, text: str, facts: Sequence[Any]) -> None:
        """Record a failure if ONNX Runtime confirms the counterexample, or if `facts` is empty, so
        that nothing can be run. The claim is undecided if ONNX Runtime does not confirm it, or if
        `claimed` depends on numbers that the solver chose.
        """
        if names_of(claimed) & self.values.free.keys():
            self.findings.skipped[value.place] = f"{OPEN}depends on numbers that the solver chooses"
        elif facts and (doubt := self._doubt(value, facts)):
            self.findings.skipped[value.place] = f"{OPEN}{doubt}"
        else:
            self.findings.failures[value.place] = text

    def _doubt(self, value: Value, facts: Sequence[Any]) -> str:
        """Return the reason why no call with these facts is a counterexample; empty if one is."""
        try:
            model, inputs = self.call.inputs(*facts)
        except ValueError:
            return "refuted in calls only that no session makes"
        try:
            numbers = evaluated(self.part, value.name, inputs, self.folder)
        except load_errors():  # the graph fails in this call
            return ""
        at = tuple(model.eval(z3.IntVal(0) + i, True).as_long() for i in value.index)
        got, entry = numbers[at].item(), value.entry
        if isinstance(entry, (Score, float)):
            hidden = z3.is_true(model.eval(z3.Or(real(entry).hidden), True))
            same = hidden == (not got >= HIDDEN)
        else:
            same = not z3.is_true(model.eval(z3.Or(differ(entry, got)), True))
        return "" if same else f"the solver expects another value than {got} of ONNX Runtime"

    def _of_mask(self, value: Value, layers: Sequence[int]) -> None:
        """Prove which keys a mask shows to each query, and its biases."""
        call, hidden, score = self.call, self._hidden_beside(value.name), value.entry
        shown = negated(score.hidden) if isinstance(score, Score) else truth(score)
        q, k = (call.rule(name, value.in_windows) for name in "qk")
        proved: set[Any] = set()  # rules, with window and chunk, that were proved for a layer
        for layer in layers if self.manifest.places else ():
            if not 0 <= layer < len(self.places.sees):
                count = len(self.places.sees)
                text = f"expected a mask of {count} layers, got layer {layer} that reads it"
                self.findings.failures[value.place] = text
                return
            rule, seen = self.places.sees[layer], shown
            if not rule:
                self.findings.skipped[value.place] = "a layer that declares no keys that it sees"
                continue
            if layer in hidden:  # in other layers, the mask alone decides
                window, chunk = hidden[layer]
                behind = call.rule("first", value.in_windows) + call.column - call.slot
                seen = both(seen, behind >= 0)
                seen = both(seen, behind < window) if window else seen
                seen = both(seen, behind <= q % chunk) if chunk else seen
            expected = both(k >= 0, call.rule(rule, value.in_windows))
            if value.sinks:
                expected = either(call.slot < 0, expected)
            facts = [*value.inside, q >= 0, differ(seen, expected)]
            alike = rule, hidden.get(layer)
            if alike not in proved and (model := call.smallest(*facts)) is not None:
                wrong = "seen" if z3.is_false(model.eval(expected, True)) else "hidden"
                at = f"layer {layer}, {self._described(model, value)}"
                text = f"expected keys where {rule}, got one that is {wrong}; {at}"
                self._refuted(value, seen, text, facts if value.name else ())
                return
            proved.add(alike)
            self.findings.compared += 1
            if isinstance(score, Score) and not self._of_bias(value, score, layer):
                return

    def _hidden_beside(self, mask: str) -> dict[int, tuple[int, int]]:
        """Return by layer the window and the chunk, 0 for none, by which nodes with this mask hide
        further keys. mask: name of the mask; empty for nodes without one.
        """
        found = {}
        for node, layer in self.part.attention:
            name = (node.inputs[10:11] or [""])[0]
            if node.operator in BY_SLOT and self.part.casts.get(name, name) == mask:
                numbers = (node.attributes.get(n, 0) for n in ("local_window_size", "chunk_size"))
                window, chunk = (max(int(number), 0) for number in numbers)
                found[layer] = window, chunk
        return found

    def _of_bias(self, value: Value, score: Score, layer: int) -> bool:
        """Prove that the biases of each head are a constant times the declared rule. Return False
        if that is refuted.
        """
        number = z3.simplify(score.value)
        if z3.is_rational_value(number) and number.as_fraction() == 0:
            return True
        rule = self.places.biases[layer] if layer < len(self.places.biases) else ""
        if not rule:
            if not any("k" in words(row) for row in self._declared([layer], True)):
                why = "a bias that declares no rule: only hidden keys are proved"
                self.findings.skipped[value.place] = why
            return True
        unit = z3.ToReal(self.call.rule(rule, value.in_windows))
        axes = zip(value.axes, value.index, strict=True)
        heads = {i: range(int(axis)) for axis, i in axes if axis not in "bst1"}
        for numbers in itertools.product(*heads.values()):
            at_head = [i == number for i, number in zip(heads, numbers, strict=True)]
            facts = [*self._where(value), *at_head, negated(score.hidden)]
            if (near := self.solver.model(*facts, z3.Or(unit == 1, unit == -1))) is None:
                continue
            slope = near.eval(score.value / unit, True)
            facts.append(score.value != z3.If(slope < 0, -slope, slope) * unit)
            if (model := self.call.smallest(*facts)) is not None:
                got = model.eval(score.value, True).as_decimal(6)
                text = f"expected biases of head {list(numbers)} that are a constant times {rule}"
                text += f", got {got}; {self._described(model, value)}"
                self._refuted(value, score.value, text, facts)
                return False
            self.findings.compared += 1
        return True

    def _of_casts(self) -> None:
        """Prove that casts keep integers as they are."""
        for node in self.part.nodes:
            most = EXACT.get(node.attributes.get("to", 0)) if node.operator == "Cast" else None
            if most is None or node.inputs[0] not in self.values.tensors:
                continue
            tensor, place = self.values.tensors[node.inputs[0]], f"{node.outputs[0]} (Cast)"[:128]
            index = [z3.Int(f"axis {axis}") for axis in range(len(tensor.shape))]
            pairs = zip(index, tensor.shape, strict=True)
            inside = [z3.And(i >= 0, i < size) for i, size in pairs]
            try:
                entry = tensor.at(index)
                if not z3.is_int(entry):
                    continue
                large = self.call.smallest(*inside, z3.Or(entry > most, entry < -most))
            except MALFORMED as reason:
                self.findings.skipped[place] = reason_of(reason)
                continue
            if large is None:
                self.findings.compared += 1
                continue
            text = "larger whole numbers may be rounded"
            casts = [n for n in self.part.after(node.outputs[0])[1] if n.operator == "Cast"]
            if any(cast.attributes.get("to") in INTEGERS for cast in (node, *casts)):
                number = large.eval(entry, True)
                self.findings.failures[place] = f"expected at most {most}, got {number}: {text}"
            else:
                self.findings.skipped[place] = f"above {most:,}, {text}"

    def _described(self, model: z3.ModelRef, value: Value) -> str:
        """Return the call of a counterexample as text."""
        call, axes = self.call, value.axes
        names: dict[str, Any] = {"S": call.columns}
        if call.caches and (self.manifest.in_place and not call.by_mask) and "b" in axes:
            names |= {"cached": call.cached(call.row)}
        elif call.caches:
            names |= {"P": call.slots}
        if "s" in axes:
            names |= {"column": call.column, "position": call.rule("q")}
        if "t" in axes:
            key = call.rule("k", value.in_windows)
            names |= {"slot": call.slot, "position of the key": key}
        return ", ".join(f"{name} {model.eval(number, True)}" for name, number in names.items())


def words(rule: str) -> set[str]:
    """Return the names of positions in a rule."""
    return {*NAME.findall(rule)} - {"max", "min", "abs", "and", "or", "not", "if", "else"}


def is_truth(x: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(x, bool) or z3.is_bool(x)


def differ(x: Any, y: Any) -> Any:
    """Return whether two values differ."""
    return z3.Xor(truth(x), truth(y)) if is_truth(x) or is_truth(y) else x != y


def names_of(value: Any) -> set[str]:
    """Return the names of the functions that a value is made of."""
    names, parts, known = set(), [value], set()
    while parts:
        part = parts.pop()
        if z3.is_expr(part) and part.get_id() not in known:
            known.add(part.get_id())
            names.add(part.decl().name())
            parts += part.children()
    return names
