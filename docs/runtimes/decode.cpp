// Run model.pt with libtorch alone. Written by `posenc inspect FOLDER --runtime libtorch`.
//
// model: decoder for target torchscript, float32, signature positions
// encoding: rope in 5 of 5 layers
// sizes: layers 5, width 128, heads 4, kv heads 2, head size 32, vocabulary 256, a step reads 955904 weights
// positions: 0 .. 4095
// interface: 1
//
// T is the folder of libtorch or of the torch wheel, with headers and libraries:
// T=$(python -c "import torch; print(torch.__path__[0])")
// g++ -std=c++20 -O2 decode.cpp -o decode -I$T/include -I$T/include/torch/csrc/api/include -L$T/lib -Wl,-rpath,$T/lib -ltorch -ltorch_cpu -lc10
// ./decode FOLDER 16 100 101 102   (16 tokens after a prompt of three)

#include <torch/script.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

using States = std::vector<at::Tensor>;

constexpr int64_t POSITIONS = 4096;  // 0 .. POSITIONS - 1
constexpr int64_t VOCABULARY = 256;
constexpr int64_t CAPACITY = 1024;  // slots of the caches: tokens that the row can hold

// Axis of the slots of each state; -1 for a state that each call replaces.
const std::vector<int64_t> AXES = {1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2};

// Refuses a call that the graph cannot compute.
void expect(bool holds, const std::string& rule) {
  if (holds) return;
  std::cerr << "expected " << rule << '\n';
  std::exit(1);
}

// Returns the states of a row without tokens, in the order of the graph.
States empty() {
  return {
      at::full({1, CAPACITY}, -1, at::kLong),  // past_positions
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.0.key
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.0.value
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.1.key
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.1.value
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.2.key
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.2.value
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.3.key
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.3.value
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.4.key
      at::full({1, 2, CAPACITY, 32}, 0, at::kFloat),  // past_key_values.4.value
  };
}

// Feeds x, new tokens of a row that holds `held` tokens. Returns the logits of the last token and updates `states`.
at::Tensor call(torch::jit::Module& module, States& states, const at::Tensor& x, int64_t held, int64_t start = 0) {
  const c10::InferenceMode guard;
  const int64_t count = x.size(1), first = start + held;
  expect(count > 0, "at least one token, got none");
  expect(start >= 0 && first + count <= POSITIONS, "positions 0 .. " + std::to_string(POSITIONS - 1) + ", got " + std::to_string(first) + " .. " + std::to_string(first + count - 1));
  expect(x.min().item<int64_t>() >= 0 && x.max().item<int64_t>() < VOCABULARY, "token ids 0 .. " + std::to_string(VOCABULARY - 1) + ", got " + std::to_string(x.min().item<int64_t>()) + " .. " + std::to_string(x.max().item<int64_t>()));
  expect(held + count <= CAPACITY, "at most " + std::to_string(CAPACITY) + " tokens in a row (CAPACITY), got " + std::to_string(held + count));
  States used;
  for (size_t index = 0; index < states.size(); ++index)
    used.push_back(AXES[index] < 0 ? states[index] : states[index].narrow(AXES[index], 0, held + count));
  const c10::List<at::Tensor> rest(States(used.begin() + 1, used.end()));
  const auto results = module.forward({x, start + at::arange(held, held + count).unsqueeze(0), at::full({1, 1}, count - 1, at::kLong), used[0], rest}).toTuple()->elements();
  return results[0].toTensor();
}

// Returns the token ids [1,S] that arguments give; -1, which calls refuse, for other text.
at::Tensor tokens_of(const std::vector<std::string>& texts) {
  std::vector<int64_t> tokens;
  for (const std::string& text : texts) {
    char* end = nullptr;
    const int64_t token = std::strtoll(text.c_str(), &end, 10);
    tokens.push_back(end == text.c_str() || *end ? -1 : token);
  }
  return at::tensor(tokens, at::kLong).unsqueeze(0);
}

// Greedy decoding.
int main(int count, char** arguments) {
  if (count < 4) {
    std::cerr << "decode FOLDER COUNT TOKEN...\n";
    return 2;
  }
  torch::jit::Module module = torch::jit::load(std::string(arguments[1]) + "/model.pt");
  at::Tensor tokens = tokens_of({arguments + 3, arguments + count});
  States states = empty();
  int64_t held = 0;
  for (int made = 0; made < std::stoi(arguments[2]); ++made) {
    const at::Tensor logits = call(module, states, tokens, held);
    held += tokens.size(1);
    const int64_t best = logits[0][-1].argmax().item<int64_t>();
    tokens = at::full({1, 1}, best, at::kLong);
    std::cout << best << ' ';
  }
  std::cout << '\n';
}
