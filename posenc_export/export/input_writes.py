"""Programs of torch.export that write to their inputs or buffers."""

from typing import Any, Collection, Optional

import torch


def refuse_mutation(program: torch.export.ExportedProgram, caches: Collection[Any] = ()) -> None:
    """Refuse a program that mutates buffers or inputs. ONNX export would drop the mutation
    silently, and a session could not rewind such a state.

    Args:
        caches: names of inputs that may be written in place.

    Raises:
        ValueError: the program mutates a buffer or another input; the message names it.
    """
    signature = program.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    # Programs that are not functionalized mutate by in-place operations.
    for node in program.graph.nodes:
        written = written_by(node)
        if written is not None and written.op == "placeholder" and written.name not in caches:
            mutated.append(signature.inputs_to_buffers.get(written.name, written.name))
    if mutated:
        raise ValueError(
            "export: expected state as inputs and outputs of the graph, got mutation of "
            f"{', '.join(mutated)}; return the new value instead"
        )


def written_by(node: torch.fx.Node) -> Optional[torch.fx.Node]:
    """Return the tensor, behind views, that an in-place operation writes; else None."""
    if node.op != "call_function" or not getattr(
        getattr(node.target, "_schema", None), "is_mutable", False
    ):
        return None
    return _viewed(node.args[0])  # type: ignore[arg-type]


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """Return the tensor that a chain of views starts from."""
    while node.op == "call_function":
        returns = getattr(getattr(node.target, "_schema", None), "returns", [])
        if not returns or returns[0].alias_info is None:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node
