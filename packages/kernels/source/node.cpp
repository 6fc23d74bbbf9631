#include "node.h"

#include <cmath>

namespace posenc {
namespace {

bool present(OrtStatus* status) {
  if (status) api->ReleaseStatus(status);
  return !status;
}

int64_t integer(const OrtKernelInfo* info, const char* name, int64_t otherwise) {
  int64_t value;
  float other;
  if (present(api->KernelInfoGetAttribute_int64(info, name, &value))) return value;
  expect(!present(api->KernelInfoGetAttribute_float(info, name, &other)),
         std::string(name) + " as an integer, got a float");
  return otherwise;
}

float number(const OrtKernelInfo* info, const char* name, float otherwise) {
  float value;
  int64_t other;
  if (present(api->KernelInfoGetAttribute_float(info, name, &value))) return value;
  expect(!present(api->KernelInfoGetAttribute_int64(info, name, &other)),
         std::string(name) + " as a float, got an integer");
  return otherwise;
}

}  // namespace

Node::Node(const OrtKernelInfo* info, Format format) : format_(format) {
  heads_ = integer(info, "num_heads", 0);
  kv_heads_ = integer(info, "kv_num_heads", 0);
  expect(kv_heads_ > 0 && heads_ > 0 && heads_ % kv_heads_ == 0,
         "num_heads to be a multiple of kv_num_heads, both above 0, got " + text(heads_) +
             " and " + text(kv_heads_));
  expect(heads_ <= MOST_HEADS, "num_heads up to " + text(MOST_HEADS) + ", got " + text(heads_));
  interleaved_ = integer(info, "rotary_interleaved", 0) != 0;
  window_ = std::max<int64_t>(0, integer(info, "local_window_size", 0));
  chunk_ = std::max<int64_t>(0, integer(info, "chunk_size", 0));
  scale_ = number(info, "scale", 0);
  softcap_ = number(info, "softcap", 0);
  key_row_scale_ = number(info, "key_row_scale", 1);
}

// Sizes of the caches and of the new heads, which are packed as one input or are three.
void Node::read_heads(Call& call, const Tensor* in) const {
  const Tensor &q = in[QUERY], &keys = in[PAST_KEY], &values = in[PAST_VALUE];
  expect(q.rank == 3, "query [B,S,n], got rank " + text(q.rank));
  expect(keys.rank == 4 && values.rank == 4, "caches [B,K,M,D]");
  call.rows = q.sizes[0];
  call.tokens = q.sizes[1];
  call.heads = heads_;
  call.kv_heads = kv_heads_;
  call.group = heads_ / kv_heads_;
  call.capacity = keys.sizes[2];
  call.keys.size = keys.sizes[3];
  call.values.size = values.sizes[3];
  expect(keys.has({call.rows, kv_heads_, call.capacity, call.keys.size}) &&
             values.has({call.rows, kv_heads_, call.capacity, call.values.size}),
         "caches with the rows of query, " + text(kv_heads_) + " heads and one capacity");
  for (int64_t size : {call.keys.size, call.values.size})
    expect(size > 0 && size % 8 == 0 && size <= MOST_NUMBERS,
           "head sizes that are multiples of 8 up to " + text(MOST_NUMBERS) + ", got " +
               text(size));
  const int64_t of_q = heads_ * call.keys.size, of_keys = kv_heads_ * call.keys.size;
  const int64_t of_values = kv_heads_ * call.values.size;
  call.q = q.numbers<float>();
  if (!in[KEY].data && !in[VALUE].data) {
    call.q_stride = call.keys.stride = call.values.stride = of_q + of_keys + of_values;
    call.keys.heads = call.q + of_q;
    call.values.heads = call.keys.heads + of_keys;
    expect(q.sizes[2] == call.q_stride,
           "packed query, key and value of " + text(call.q_stride) + " numbers, got " +
               text(q.sizes[2]));
    return;
  }
  expect(q.has({call.rows, call.tokens, of_q}) && in[KEY].has({call.rows, call.tokens, of_keys}) &&
             in[VALUE].has({call.rows, call.tokens, of_values}),
         "query, key and value [B,S,n] with the heads of the attributes and the head sizes of the "
         "caches");
  call.q_stride = of_q;
  call.keys.heads = in[KEY].numbers<float>();
  call.keys.stride = of_keys;
  call.values.heads = in[VALUE].numbers<float>();
  call.values.stride = of_values;
}

void Node::read_caches(Call& call, const Tensor* in) const {
  call.format = format_;
  if (format_ != INT8) return;
  expect(in[KEY_SCALES].has({kv_heads_ * call.keys.size}) &&
             in[VALUE_SCALES].has({kv_heads_ * call.values.size}),
         "k_scale and v_scale with one number for each channel of an int8 cache");
  call.keys.scales = in[KEY_SCALES].numbers<float>();
  call.values.scales = in[VALUE_SCALES].numbers<float>();
}

// First slot and number of new tokens of each row, all within the capacity.
void Node::read_rows(Call& call, const Tensor* in, std::vector<int64_t>& rows) const {
  const Tensor &last = in[LAST_SLOTS], &slots = in[SLOTS];
  expect(last.has({call.rows}), "seqlens_k [B]");
  expect(slots.rank == 2 && slots.sizes[0] == call.rows && (slots.sizes[1] > 0 || !call.tokens),
         "cache_position [B,S]");
  rows.assign(2 * call.rows, 0);
  for (int64_t row = 0; row < call.rows; row++) {
    if (!call.tokens) continue;
    const int64_t first = slots.numbers<int64_t>()[row * slots.sizes[1]];
    expect(first >= 0 && first <= call.capacity,
           "cache_position of row " + text(row) + " within 0 .. " + text(call.capacity) +
               ", got " + text(first));
    const int64_t count = int64_t{last.numbers<int32_t>()[row]} + 1 - first;
    expect(count >= 0 && count <= call.tokens && first + count <= call.capacity,
           "seqlens_k of row " + text(row) + " to end at most " + text(call.tokens) +
               " tokens after slot " + text(first) + " within " + text(call.capacity) +
               " slots, got " + text(last.numbers<int32_t>()[row]));
    rows[row] = first;
    rows[call.rows + row] = count;
    call.slots = std::max(call.slots, first + count);
  }
  call.first = rows.data();
  call.count = rows.data() + call.rows;
  if (in[POSITIONS].data) {
    expect(in[POSITIONS].has({call.rows, call.tokens}), "position_ids [B,S]");
    call.positions = in[POSITIONS].numbers<int64_t>();
  }
}

// Tables of rotations, and that the row of each token stands in them.
void Node::read_rotation(Call& call, const Tensor* in) const {
  if (!in[COS].data) return;
  const int64_t length = in[COS].rank == 2 ? in[COS].sizes[0] : 0;
  const int64_t half = in[COS].rank == 2 ? in[COS].sizes[1] : 0;
  const bool of_keys = in[KEY_COS].data != nullptr;
  expect(in[COS].rank == 2 && in[SIN].has({length, half}) && 2 * half <= call.keys.size &&
             (!of_keys || (in[KEY_COS].has({length, half}) && in[KEY_SIN].has({length, half}))),
         "tables of rotations of one shape [rows,r/2] with r up to the head size");
  call.of_q = {in[COS].numbers<float>(), in[SIN].numbers<float>(), half, interleaved_};
  call.of_k = call.of_q;
  if (of_keys) {
    call.of_k.cos = in[KEY_COS].numbers<float>();
    call.of_k.sin = in[KEY_SIN].numbers<float>();
  }
  for (int64_t row = 0; row < call.rows; row++)
    for (int64_t s = 0; s < call.count[row]; s++) {
      const int64_t at =
          call.positions ? call.positions[row * call.tokens + s] : call.first[row] + s;
      // Positions below 0, of padding, have row 0.
      expect(std::max<int64_t>(at, 0) < length,
             "a position of row " + text(row) + " within the " + text(length) +
                 " rows of the rotation tables, got " + text(at));
    }
}

// Tables by which keys are rotated further for each token: all digits of every distance.
void Node::read_turns(Call& call, const Tensor* in) const {
  const Tensor &cos = in[TURN_COS], &sin = in[TURN_SIN];
  expect(cos.data || !sin.data, "turn_cos beside turn_sin");
  if (!cos.data) return;
  const int64_t rows = cos.rank == 4 ? cos.sizes[2] : 0, half = cos.rank == 4 ? cos.sizes[3] : 0;
  expect(rows > 0 && rows % DIGITS == 0 && 2 * half <= call.keys.size &&
             cos.has({call.rows, call.tokens, rows, half}) &&
             sin.has({call.rows, call.tokens, rows, half}),
         "turn_cos and turn_sin [B,S,16*digits,r/2] with r up to the head size");
  int64_t distances = 1;  // a product of digits below 2^52, since slots are below 2^48
  for (int64_t row = 0; row < rows && distances < call.slots; row += DIGITS) distances *= DIGITS;
  expect(distances >= call.slots, "turn_cos with all digits of " + text(call.slots) +
                                      " distances, got " + text(distances));
  call.turns = {cos.numbers<float>(), sin.numbers<float>(), half, interleaved_};
  call.turn_rows = rows;
}

void Node::read_scores(Call& call, const Tensor* in) const {
  call.scale = scale_ != 0 ? scale_ : 1 / std::sqrt(static_cast<float>(call.keys.size));
  call.softcap = softcap_;
  call.window = window_;
  call.chunk = chunk_;
  expect(!chunk_ || call.positions, "position_ids for attention in chunks");
  if (in[SINKS].data) {
    expect(in[SINKS].has({heads_}), "head_sink [H]");
    call.sinks = in[SINKS].numbers<float>();
  }
  if (in[BY_DISTANCE].data) {
    const Tensor& table = in[BY_DISTANCE];
    expect(table.rank == 2 && table.sizes[0] == heads_ && table.sizes[1] > 0,
           "distance_bias [H,range]");
    call.by_distance = table.numbers<float>();
    call.range = table.sizes[1];
  }
  if (in[BIAS].data) read_bias(call, in[BIAS]);
  read_picked(call, in);
  if (in[DECAYS].data) read_decays(call, in[DECAYS]);
  if (in[COUNT_ROWS].data) read_count_rows(call, in[COUNT_ROWS]);
  if (in[PIECES].data) read_pieces(call, in);
  if (in[DISTANCE_KEYS].data) read_distance_keys(call, in);
}

void Node::read_bias(Call& call, const Tensor& bias) const {
  expect(bias.rank == 4 && (bias.sizes[0] == call.rows || bias.sizes[0] == 1) &&
             (bias.sizes[1] == heads_ || bias.sizes[1] == 1) && bias.sizes[2] == call.tokens &&
             bias.sizes[3] >= call.slots,
         "attention_bias [B or 1,H or 1,S,T] with T of at least " + text(call.slots));
  const int64_t of_token = bias.sizes[3], of_head = of_token * bias.sizes[2];
  call.bias = bias.numbers<float>();
  call.bias_strides[0] = bias.sizes[0] == 1 ? 0 : of_head * bias.sizes[1];
  call.bias_strides[1] = bias.sizes[1] == 1 ? 0 : of_head;
  call.bias_strides[2] = of_token;
}

// Rows of queries and of keys that are picked by distance, all of one table.
void Node::read_picked(Call& call, const Tensor* in) const {
  const Tensor &queries = in[QUERY_ROWS], &keys = in[KEY_ROWS], &rows = in[ROW_OF_DISTANCE];
  if (!rows.data) {
    expect(!queries.data && !keys.data, "row_of_distance for rows of queries or of keys");
    return;
  }
  const Tensor& any = queries.data ? queries : keys;
  expect(any.data && any.rank == 4, "query_rows or key_rows of rank 4");
  call.table_rows = any.sizes[3] * any.sizes[1] / heads_;
  expect(call.table_rows > 0, "a row of query_rows or key_rows");
  expect(!queries.data || queries.has({call.rows, heads_, call.tokens, call.table_rows}),
         "query_rows [B,H,S,R]");
  if (keys.data) {
    const int64_t slots = keys.rank == 4 ? keys.sizes[2] : 0;
    const bool by_slot = keys.has({call.rows, heads_, slots, call.table_rows});
    expect(slots >= call.slots &&
               (by_slot || keys.has({call.rows, heads_ * call.table_rows, slots, 1})),
           "key_rows [B,H*R,T,1] or [B,H,T,R] with T of at least " + text(call.slots));
    call.key_row_strides[0] = by_slot ? 1 : slots;
    call.key_row_strides[1] = by_slot ? call.table_rows : 1;
    call.of_head_rows = slots * call.table_rows;
  }
  expect(rows.rank == 1 && rows.sizes[0] > 0, "row_of_distance [range]");
  call.query_rows = queries.numbers<float>();
  call.key_rows = keys.numbers<float>();
  call.key_row_scale = key_row_scale_;
  call.row_of_distance = rows.numbers<int32_t>();
  call.row_range = rows.sizes[0];
  for (int64_t d = 0; d < call.row_range; d++)
    expect(call.row_of_distance[d] >= 0 && call.row_of_distance[d] < call.table_rows,
           "row_of_distance within the " + text(call.table_rows) + " rows, got " +
               text(call.row_of_distance[d]));
}

void Node::read_decays(Call& call, const Tensor& decays) const {
  expect(decays.rank == 4 && decays.sizes[2] >= call.slots &&
             decays.has({call.rows, heads_, decays.sizes[2], 1}),
         "key_decays [B,H,T,1] with T of at least " + text(call.slots));
  call.decays = decays.numbers<float>();
  call.decay_slots = decays.sizes[2];
}

void Node::read_count_rows(Call& call, const Tensor& rows) const {
  const int64_t size = rows.rank == 4 ? rows.sizes[3] : 0;
  expect(size > 0 && rows.has({call.rows, heads_, call.tokens, size}), "count_rows [B,H,S,R]");
  expect(softcap_ <= 0, "no softcap beside count_rows, which products count");
  call.count_rows = rows.numbers<float>();
  call.largest_count = size - 1;
}

// Numbers of distances and of queries, and the pieces of a function of their products.
void Node::read_pieces(Call& call, const Tensor* in) const {
  const Tensor &numbers = in[NUMBERS], &pieces = in[PIECES];
  expect(numbers.rank == 1 && numbers.sizes[0] > 0, "number_of_distance [range]");
  expect(in[FACTORS].has({call.rows, call.tokens}), "query_factors [B,S]");
  expect(pieces.rank == 3 && pieces.sizes[0] == heads_ && pieces.sizes[1] > 0 &&
             pieces.sizes[2] == 3,
         "pieces [H,pieces,3]");
  call.numbers = numbers.numbers<float>();
  call.number_range = numbers.sizes[0];
  call.factors = in[FACTORS].numbers<float>();
  call.pieces = pieces.numbers<float>();
  call.of_head_pieces = pieces.sizes[1];
}

void Node::read_distance_keys(Call& call, const Tensor* in) const {
  const Tensor& keys = in[DISTANCE_KEYS];
  expect(keys.rank == 3 && keys.sizes[1] > 2 * NEIGHBOURS &&
             keys.has({heads_, keys.sizes[1], call.keys.size}),
         "distance_keys [H,n,D] with n above " + text(2 * NEIGHBOURS));
  expect(in[DISTANCE_QUERIES].has({call.rows, heads_, call.tokens, call.keys.size}),
         "distance_queries [B,H,S,D]");
  call.distance_queries = in[DISTANCE_QUERIES].numbers<float>();
  call.distance_keys = keys.numbers<float>();
  call.key_count = keys.sizes[1];
  int64_t seen = call.slots;
  for (int64_t limit : {window_, chunk_})
    if (limit > 0) seen = std::min(seen, limit);
  expect(seen - 1 <= call.largest_distance(),
         "distance_keys up to distance " + text(seen - 1) + ", got " +
             text(call.largest_distance()));
}

}  // namespace posenc
