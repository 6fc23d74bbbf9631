// A node of the operator: its attributes, and the reading and checking of its inputs.
#pragma once

#include <vector>

#include "call.h"
#include "tensors.h"

namespace posenc {

// Inputs 0 to 13 and outputs 0 to 2 are those of com.microsoft::GroupQueryAttention.
enum Input {
  QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LAST_SLOTS, LONGEST, COS, SIN, POSITIONS, BIAS, SINKS,
  KEY_SCALES, VALUE_SCALES, BY_DISTANCE, SLOTS, KEY_COS, KEY_SIN, QUERY_ROWS, KEY_ROWS,
  ROW_OF_DISTANCE, DECAYS, COUNT_ROWS, NUMBERS, FACTORS, PIECES, DISTANCE_QUERIES,
  DISTANCE_KEYS, TURN_COS, TURN_SIN, INPUTS
};
enum Output { RESULT, PRESENT_KEY, PRESENT_VALUE, ROW_WEIGHTS, OUTPUTS };

constexpr OrtElementType OF_CACHES[FORMATS] = {ORT_FLOAT, ORT_FLOAT16, ORT_INT8};

inline OrtElementType element(size_t input, Format format) {
  if (input == PAST_KEY || input == PAST_VALUE) return OF_CACHES[format];
  if (input == LAST_SLOTS || input == LONGEST || input == ROW_OF_DISTANCE) return ORT_INT32;
  return input == POSITIONS || input == SLOTS ? ORT_INT64 : ORT_FLOAT;
}

// `compute` runs it.
class Node {
 public:
  Node(const OrtKernelInfo* info, Format format);

  void compute(OrtKernelContext* context) const;

 private:
  void read_heads(Call& call, const Tensor* in) const;
  void read_caches(Call& call, const Tensor* in) const;
  void read_rows(Call& call, const Tensor* in, std::vector<int64_t>& rows) const;
  void read_rotation(Call& call, const Tensor* in) const;
  void read_turns(Call& call, const Tensor* in) const;
  void read_scores(Call& call, const Tensor* in) const;
  void read_bias(Call& call, const Tensor& bias) const;
  void read_picked(Call& call, const Tensor* in) const;
  void read_decays(Call& call, const Tensor& decays) const;
  void read_count_rows(Call& call, const Tensor& rows) const;
  void read_pieces(Call& call, const Tensor* in) const;
  void read_distance_keys(Call& call, const Tensor* in) const;

  int64_t heads_, kv_heads_, window_, chunk_;
  float scale_, softcap_, key_row_scale_;
  Format format_;
  bool interleaved_;
};

}  // namespace posenc
