"""Write a program in C++ for libtorch, which runs model.pt of target torchscript."""

from string import Template
from typing import Dict

from posenc_export.clients.states import capacity, gives, heading
from posenc_export.runtime.artefact.manifest import Manifest, State

# By graph input: its value for a call with `count` tokens on one row that holds `held` tokens, the first of them at position `start`.
FEEDS: Dict[str, str] = {
    "input_ids": "x",
    "hidden_states": "x",
    "token_type_ids": "at::zeros({1, count}, at::kLong)",
    "position_ids": "start + at::arange(held, held + count).unsqueeze(0)",
    "logits_index": "at::full({1, 1}, count - 1, at::kLong)",
    "attention_mask": "at::ones({1, held + count}, at::kLong)",
}
DTYPES = {"float32": "at::kFloat", "float16": "at::kHalf", "int64": "at::kLong", "int32": "at::kInt"}
PROGRAM = Template("""// Run model.pt with libtorch alone. Written by `posenc inspect FOLDER --runtime libtorch`.
//
$heading
//
// T is the folder of libtorch or of the torch wheel, with headers and libraries:
// T=$$(python -c "import torch; print(torch.__path__[0])")
// g++ -std=c++20 -O2 $source.cpp -o $source -I$$T/include -I$$T/include/torch/csrc/api/include -L$$T/lib -Wl,-rpath,$$T/lib -ltorch -ltorch_cpu -lc10
// ./$usage

#include <torch/script.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

using States = std::vector<at::Tensor>;

$capacity// Returns the states of a row without tokens, in the order of the graph.
States empty() {
  return {
$states  };
}

// Feeds x, new tokens of a row that holds `held` tokens. Returns $gives and updates `states`.
at::Tensor call(torch::jit::Module& module, States& states, const at::Tensor& x, int64_t held, int64_t start = 0) {
  const c10::InferenceMode guard;
  const int64_t count = x.size(1);
$call
  return results[0].toTensor();
}

$main""")
CAPACITY = Template("""constexpr int64_t CAPACITY = $slots;  // slots of the caches: tokens that the row can hold

// Axis of the slots of each state; -1 for a state that each call replaces.
const std::vector<int64_t> AXES = {$axes};

""")
# Caches are written where they are, and the module is given the slots that are in use behind the call.
SHOWN = """  States given;
  for (size_t index = 0; index < states.size(); ++index)
    given.push_back(AXES[index] < 0 ? states[index] : states[index].narrow(AXES[index], 0, held + count));
"""
WITH_POSITIONS = Template("""  const c10::List<at::Tensor> rest(States(given.begin() + 1, given.end()));
  const auto results = module.forward({$feeds, given[0], rest}).toTuple()->elements();""")
WITHOUT_POSITIONS = Template("""  const auto results = module.forward({$feeds, c10::List<at::Tensor>($states)}).toTuple()->elements();""")
REPLACED = Template("""
  const States present = results[$list].toTensorVector();
  for (size_t index = $first; index < states.size(); ++index)
    if (AXES[index] < 0) states[index] = present[index - $first];""")
DECODE = """// Greedy decoding.
int main(int count, char** arguments) {
  if (count < 4) {
    std::cerr << "decode FOLDER COUNT TOKEN...\\n";
    return 2;
  }
  torch::jit::Module module = torch::jit::load(std::string(arguments[1]) + "/model.pt");
  std::vector<int64_t> tokens;
  for (int index = 3; index < count; ++index) tokens.push_back(std::stoll(arguments[index]));
  States states = empty();
  int64_t held = 0;
  for (int made = 0; made < std::stoi(arguments[2]); ++made) {
    const at::Tensor logits = call(module, states, at::tensor(tokens, at::kLong).unsqueeze(0), held);
    held += static_cast<int64_t>(tokens.size());
    tokens = {logits[0][-1].argmax().item<int64_t>()};
    std::cout << tokens[0] << ' ';
$stop  }
  std::cout << '\\n';
}
"""
STOP = "    if (const std::vector<int64_t> stop = {{{ids}}}; std::find(stop.begin(), stop.end(), tokens[0]) != stop.end()) break;\n"
STEPS = """int main(int count_of_arguments, char** arguments) {
  if (count_of_arguments < 2) {
    std::cerr << "run FOLDER\\n";
    return 2;
  }
  torch::jit::Module module = torch::jit::load(std::string(arguments[1]) + "/model.pt");
  States states = empty();
  int64_t held = 0;
  for (const int64_t count : {$counts}) {
    const at::Tensor output = call(module, states, $x, held);
    held += count;
    std::cout << held << ' ' << output[0][-1].slice(0, 0, 4) << '\\n';
  }
}
"""


def program(manifest: Manifest) -> str:
    """Return the text of the program."""
    decodes = manifest.kind == "decoder"
    feeds = ", ".join(_feed(value.name, manifest) for value in manifest.inputs)
    return PROGRAM.substitute(
        heading="\n".join(f"// {line}" for line in heading(manifest)),
        source="decode" if decodes else "run",
        usage="decode FOLDER 16 100 101 102   (16 tokens after a prompt of three)" if decodes else "run FOLDER",
        capacity=_capacity(manifest),
        states="".join(f"      {_state(state)},  // {state.past}\n" for state in manifest.states),
        call=_call(feeds, manifest),
        gives=gives(manifest),
        main=_main(manifest),
    )


def _feed(name: str, manifest: Manifest) -> str:
    coordinates = f".expand({{{1 + manifest.axes}, 1, count}})" if name == "position_ids" and manifest.axes else ""
    return f"({FEEDS[name]}){coordinates}" if coordinates else FEEDS[name]


def _capacity(manifest: Manifest) -> str:
    if not manifest.states:
        return ""
    axes = ", ".join(str(state.axis) if state.update == "in_place" else "-1" for state in manifest.states)
    return CAPACITY.substitute(slots=capacity(manifest), axes=axes)


def _call(feeds: str, manifest: Manifest) -> str:
    positions = bool(manifest.states) and manifest.states[0].past == "past_positions"
    called = (WITH_POSITIONS if positions else WITHOUT_POSITIONS).substitute(feeds=feeds, states="given" if manifest.states else "states")
    replaced = any(state.update == "replace" for state in manifest.states)
    first = int(positions)
    return (SHOWN if manifest.states else "") + called + (REPLACED.substitute(list=1 + first, first=first) if replaced else "")


def _state(state: State) -> str:
    sizes = ["1", *("CAPACITY" if isinstance(axis, str) else str(axis) for axis in state.axes[1:])]
    return f"at::full({{{', '.join(sizes)}}}, {state.fill}, {DTYPES[state.dtype]})"


def _main(manifest: Manifest) -> str:
    if manifest.kind == "decoder":
        stop = STOP.format(ids=", ".join(map(str, manifest.stop_ids))) if manifest.stop_ids else ""
        return Template(DECODE).substitute(stop=stop)
    width = manifest.inputs[0].axes[-1]
    x = f"at::full({{1, count, {width}}}, 0.5, {DTYPES[manifest.dtype]})" if manifest.kind == "block" else "at::arange(count).unsqueeze(0)"
    return Template(STEPS).substitute(x=x, counts="8, 1, 1, 1" if manifest.states else "8")
