"""Graphs of torch targets: layout of weights, and operations that layers share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc_export.export.describe import describe
from posenc_export.export.targets.torch_files import _merge_equal_nodes, laid_out, write_torchscript
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.graphs.torch_graph import read_program
from tests.tiny import block, decoder
from tests.traces import exported, sources

pytestmark = pytest.mark.xdist_group("plain runtimes")


def weights_of_linear_layers(folder: Path, target: str) -> list[Tensor]:
    """Return the weights that the linear layers of an artefact read."""
    if target == "torchscript":
        graph: Any = torch.jit.load(str(folder / "model.pt")).graph
        return [list(node.inputs())[1].toIValue() for node in graph.findAllNodes("aten::linear")]
    program = read_program(folder / "model.pt2", manifests.read(folder))
    names = program.graph_signature.inputs_to_parameters
    return [
        program.state_dict[names[node.args[1].name]]
        for node in program.graph.nodes
        if node.target is torch.ops.aten.linear.default
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "target", ["torchscript", pytest.param("pt2", marks=pytest.mark.exhaustive)]
)
def test_weights_are_contiguous_along_their_longer_axis_except_a_table_that_is_also_looked_up(
    target: str, tmp_path: Path
) -> None:
    exported(tmp_path / "artefact", decoder("rope"), target)
    *weights, head = weights_of_linear_layers(tmp_path / "artefact", target)
    assert {weight.stride().index(1) for weight in weights} == {0, 1}
    assert all(weight.stride()[weight.shape.index(max(weight.shape))] == 1 for weight in weights)
    assert head.size(0) > head.size(1) and head.is_contiguous()


def test_a_script_is_the_same_in_every_run_though_torch_folds_constants_in_several_orders(
    tmp_path: Path,
) -> None:
    source = sources(block("deberta")).of("float32")
    described = describe(source.model, "torchscript", "positions")
    written = set()
    for run in range(6):
        (tmp_path / str(run)).mkdir()
        write_torchscript(source, described, tmp_path / str(run))
        written.add((tmp_path / str(run) / "model.pt").read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_a_laid_out_weight_keeps_its_values(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(laid_out(weight), weight)


class Repeats(torch.nn.Module):
    """Repeats operations on an input, on a cache that it writes between them, and on tensors
    that it fills differently.
    """

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steady = x.sin() + x.sin()
        before = cache.cos()
        cache.add_(1)
        return (
            steady,
            before + cache.cos(),
            torch.zeros_like(x).add_(1) + torch.zeros_like(x).sub_(1),
        )


def test_only_operations_on_memory_that_is_not_written_are_merged() -> None:
    x, cache = torch.arange(3.0), torch.arange(4.0)
    program = torch.export.export(Repeats(), (x, cache.clone()))
    _merge_equal_nodes(program.graph, ["cache"])
    program.graph_module.recompile()
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.sin.default) == 1
    for result, wanted in zip(
        program.graph_module.forward(x, cache.clone()), Repeats()(x, cache.clone()), strict=True
    ):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
