// Layouts of packed weights, activations and cached keys and values, and the table of kernels that
// each instruction set fills. Everything here is plain data, shared by all translation units;
// functions are static, since the linker would keep one copy of any instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace smollm2 {

// ---------------------------------------------------------------------------------------------
// Weights

// Kinds of packed weight. A group is 32 consecutive k of one row; its scale (and minimum) is a
// half float, so that GGUF's Q8_0, Q4_0 and Q4_1 are held without loss.
enum class Kind : std::uint8_t {
  f32 = 0,
  bf16 = 1,
  q16 = 2,  // w = scale * q, q int16
  q8 = 3,   // w = scale * q, q int8
  q4 = 4,   // w = scale * (q - 8), q 0 ... 15
  q4m = 5,  // w = scale * q + minimum, q 0 ... 15
};

constexpr int kTileRows = 16;  // output columns that lie side by side
constexpr int kBlock = 64;     // k are padded with zeros to a multiple of this
constexpr int kGroup = 32;     // values that share one scale

static constexpr int padded(int cols) { return (cols + kBlock - 1) / kBlock * kBlock; }
static constexpr int tiles(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// Bytes of 64 k of one tile. Within a block of 64 k, 64-byte lines in this order:
//   f32   64 lines [16 rows] float                               line k
//   bf16  32 lines [16 rows][2 k] bf16                           line k/2
//   q16   32 lines [2 k][16 rows] int16, then 1 line of scales   line k/2
//   q8    16 lines [16 rows][4 k] uint8 = q + 128, then scales   line k/4
//   q4     8 lines: low nibbles as line k/4 = 2j, high nibbles 2j+1; then scales
//   q4m   as q4, then 1 line of minimums after the scales
// A line of scales or minimums is [2 groups][16 rows] half float.
static constexpr std::size_t block_bytes(Kind kind) {
  switch (kind) {
    case Kind::f32:
      return 64 * 64;
    case Kind::bf16:
      return 32 * 64;
    case Kind::q16:
      return 33 * 64;
    case Kind::q8:
      return 17 * 64;
    case Kind::q4:
      return 9 * 64;
    case Kind::q4m:
      return 10 * 64;
  }
  return 0;
}

static constexpr std::size_t tile_bytes(Kind kind, int cols) {
  return static_cast<std::size_t>(padded(cols) / kBlock) * block_bytes(kind);
}

static constexpr std::size_t packed_bytes(Kind kind, int rows, int cols) {
  return static_cast<std::size_t>(tiles(rows)) * tile_bytes(kind, cols);
}

static constexpr bool is_integer(Kind kind) {
  return kind == Kind::q8 || kind == Kind::q4 || kind == Kind::q4m;
}

// A weight [rows, cols], row-major in tiles: tile t holds rows 16t ... 16t+15, all its k; rows and
// k beyond the matrix are zero. `data` is 64-byte aligned and not owned.
struct Matrix {
  Kind kind = Kind::f32;
  int rows = 0;
  int cols = 0;
  const std::uint8_t* data = nullptr;
};

// ---------------------------------------------------------------------------------------------
// Activations of integer kinds: x = scale * q, |q| <= 127, one scale per group of 32.
// Rows are `padded(cols)` long; the padding is zero. `sum` is the sum of q over the group.
// In two terms, x = scale * q of row 2r + scale * q of row 2r + 1, whose scale is smaller by
// kTermRatio: what the first leaves over is at most half a step, and fits 127 of these.
constexpr int kTermRatio = 254;

struct QuantizedRows {
  std::int8_t* q = nullptr;     // [rows][padded]
  float* scale = nullptr;       // [rows][padded / 32]
  std::int32_t* sum = nullptr;  // [rows][padded / 32]
  int padded = 0;
  int terms = 1;  // 1 or 2
};

// ---------------------------------------------------------------------------------------------
// KV cache

// int16 holds keys in 16 bits and values in 8, int8 both in 8; each with one scale a place.
enum class KvKind : std::uint8_t { f32 = 0, int16 = 1, int8 = 2 };

constexpr int kPage = 64;          // token places of a page
constexpr int kMaxHeadSize = 256;  // the integer sums of int8 fit 32 bits up to here

// One page of one kv head: a block of keys, then a block of values. D is the head size, even and
// at most kMaxHeadSize; C is D rounded up to whole tiles of 16.
//   f32   keys [D][64 places] float             values [64 places][C] float
//   int16 keys [D/2][64 places][2 d] int16      values [16 quads][C][4 places] int8
//   int8  keys [D/4][64 places][4 d] q + 128    values [16 quads][C][4 places] int8
//         (D/4 rounded up); then 64 float scales of keys, one a place, and 64 of values
// A tile is 16 places, so that one 64-byte line of keys serves 16 scores and one line of values 16
// sums. The memory of a new block must hold finite numbers (zeros, or another sequence's values).
std::size_t kv_block_bytes(KvKind kind, int head_size);  // keys + values, a multiple of 64

constexpr int kPagesAtOnce = 4;             // pages with one softmax: its slow steps are rarer
constexpr int kBlocksAhead = kPagesAtOnce;  // blocks that are fetched before their turn

// Running softmax in base 2 of one query row: maximum, sum, and the mixed values [D] (not
// normalised).
struct Partial {
  float maximum;
  float sum;
  float* mixed;
};

// ---------------------------------------------------------------------------------------------
// Where a product goes: row r, column n of it to data[r * stride + n], or added to what is there.
struct Output {
  float* data;
  int stride;
  bool add = false;
};

// The table. `m` rows of activations; tiles [first, last) of a matrix (a last tile that sticks out
// writes only rows of the matrix). `next` are weights that will be read after these, if that is
// known: the first of them are fetched on the way.
// The bits of an output depend on its own row and column alone, not on m or the tile range.
struct Kernels {
  const char* name;

  // f32, bf16, q16: activations float [m][x_stride], padded with zeros to padded(cols).
  void (*linear_float)(const Matrix& w, const float* x, int x_stride, int m, int first, int last,
                       const Output& out, const std::uint8_t* next);
  // q8, q4, q4m: activations quantized.
  void (*linear_integer)(const Matrix& w, const QuantizedRows& x, int first_row, int m, int first,
                         int last, const Output& out, const std::uint8_t* next);

  // x [cols] -> row `row` of out: scale = max|x| / 127 of each group, q = round half to even.
  void (*quantize_row)(const float* x, int cols, const QuantizedRows& out, int row);
  // The same in two terms, to the stored rows `row` and `row + 1`.
  void (*quantize_row_twice)(const float* x, int cols, const QuantizedRows& out, int row);

  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*rms_norm)(const float* x, const float* weight, float eps, int cols, float* out);
  // Rotate halves (a, b) of a head in place: a' = a cos - b sin, b' = b cos + a sin.
  void (*rope)(float* head, const float* cos, const float* sin, int head_size);
  // out = silu(gate) * up
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  // Row `row` of a matrix of any kind as float, [cols].
  void (*unpack_row)(const Matrix& w, int row, float* out);

  // Store one key and one value [D] (after RoPE) at place `place` (0 ... 63) of a block.
  void (*kv_write)(KvKind kind, std::uint8_t* block, int place, const float* key,
                   const float* value, int head_size);
  // `rows` queries [rows][D], already scaled by log2(e)/sqrt(D), against `pages` blocks in order.
  // Query r sees the first visible[r] places of these pages (0: none). kPagesAtOnce pages at a
  // time, maximum, powers, sum and mix are merged into out[r] in order; out[r] is what came before,
  // or empty (-inf, 0, zeros). `blocks` has `more` blocks after these, which the caller wants next:
  // they are fetched meanwhile.
  void (*attend)(KvKind kind, const float* queries, int rows, const std::uint8_t* const* blocks,
                 int pages, int more, const int* visible, int head_size, Partial* out);
  // Begins to read memory that is needed soon.
  void (*fetch)(const std::uint8_t* memory, std::size_t bytes);
  // total = total merged with part (part may be empty: sum 0), in that order.
  void (*merge)(Partial& total, const Partial& part, int head_size);
};

// The best table for this CPU, or the one that SMOLLM2_ISA names.
// Throws std::runtime_error where that one is unknown or not supported here.
const Kernels& kernels();

// A table by name, or nullptr where this build or this CPU has no such.
const Kernels* kernels_for(const std::string& name);

// Names of the tables that can run here, the best last; "scalar" is always there.
std::vector<std::string> isa_names();

}  // namespace smollm2
