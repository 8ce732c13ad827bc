// The KV cache's kernels for tests and measurements: blocks are NumPy arrays of bytes.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"

namespace nb = nanobind;

namespace smollm2 {
namespace {

using Blocks = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Arrays = std::tuple<Out<float>, Out<float>, Out<float>>;
using Given = std::tuple<In<float, 1>, In<float, 1>, In<float, 2>>;

void need(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

KvKind kv_kind_of(const std::string& name) {
  if (name == "f32") return KvKind::f32;
  if (name == "int16") return KvKind::int16;
  if (name == "int8") return KvKind::int8;
  throw std::invalid_argument("unknown kind of KV cache '" + name +
                              "': choose from f32, int16, int8");
}

void need_blocks(const Blocks& blocks, KvKind kind, int head_size) {
  const std::size_t bytes = kv_block_bytes(kind, head_size);
  need(blocks.shape(1) == bytes,
       "a block has " + std::to_string(bytes) + " bytes, not " + std::to_string(blocks.shape(1)));
}

// Partials of rows: the arrays, and the records that kernels take.
struct Partials {
  Partials(std::size_t rows, std::size_t size)
      : maximum(aligned_new<float>(rows)),
        sum(aligned_new<float>(rows)),
        mixed(aligned_new<float>(rows * size)),
        arrays(Out<float>(maximum, {rows}, aligned_owner(maximum)),
               Out<float>(sum, {rows}, aligned_owner(sum)),
               Out<float>(mixed, {rows, size}, aligned_owner(mixed))) {
    for (std::size_t r = 0; r < rows; ++r) records.push_back({0, 0, mixed + r * size});
  }
  Partials(const Given& given, std::size_t rows, std::size_t size) : Partials(rows, size) {
    const auto& [maxima, sums, values] = given;
    need(maxima.size() == rows && sums.size() == rows && values.shape(0) == rows &&
             values.shape(1) == size,
         "partials are maxima [R], sums [R] and mixed values [R, D]");
    std::memcpy(mixed, values.data(), sizeof(float) * rows * size);
    for (std::size_t r = 0; r < rows; ++r) {
      records[r].maximum = maxima.data()[r];
      records[r].sum = sums.data()[r];
    }
  }
  void empty(std::size_t size) {
    for (Partial& record : records) {
      record.maximum = -std::numeric_limits<float>::infinity();
      record.sum = 0;
      std::fill_n(record.mixed, size, 0.0f);
    }
  }
  Arrays finish() {
    for (std::size_t r = 0; r < records.size(); ++r) {
      maximum[r] = records[r].maximum;
      sum[r] = records[r].sum;
    }
    return arrays;
  }
  float *maximum, *sum, *mixed;
  Arrays arrays;
  std::vector<Partial> records;
};

void write(const std::string& isa, const std::string& kind_name, const Blocks& blocks, int block,
           int place, const In<float, 1>& key, const In<float, 1>& value) {
  const KvKind kind = kv_kind_of(kind_name);
  const int size = static_cast<int>(key.size());
  need(value.size() == key.size(), "a key and its value have the same size");
  need_blocks(blocks, kind, size);
  need(block >= 0 && static_cast<std::size_t>(block) < blocks.shape(0) && place >= 0 &&
           place < kPage,
       "no place " + std::to_string(place) + " of block " + std::to_string(block));
  std::uint8_t* at = blocks.data() + static_cast<std::size_t>(block) * blocks.shape(1);
  table_of(isa).kv_write(kind, at, place, key.data(), value.data(), size);
}

Arrays attend(const std::string& isa, const std::string& kind_name, const In<float, 2>& queries,
              const Blocks& blocks, const In<int, 1>& visible, int repeats) {
  const KvKind kind = kv_kind_of(kind_name);
  const std::size_t rows = queries.shape(0), size = queries.shape(1);
  need(visible.size() == rows, "each query needs the number of places that it sees");
  need_blocks(blocks, kind, static_cast<int>(size));
  std::vector<const std::uint8_t*> pages;
  for (std::size_t i = 0; i < blocks.shape(0); ++i) {
    pages.push_back(blocks.data() + i * blocks.shape(1));
  }
  Partials out(rows, size);
  const Kernels& table = table_of(isa);
  for (int i = 0; i < repeats; ++i) {
    out.empty(size);
    table.attend(kind, queries.data(), static_cast<int>(rows), pages.data(),
                 static_cast<int>(pages.size()), 0, visible.data(), static_cast<int>(size),
                 out.records.data());
  }
  return out.finish();
}

Arrays merge(const std::string& isa, const Given& total, const Given& part) {
  const std::size_t rows = std::get<2>(total).shape(0), size = std::get<2>(total).shape(1);
  Partials out(total, rows, size);
  const Partials other(part, rows, size);
  for (std::size_t r = 0; r < rows; ++r) {
    table_of(isa).merge(out.records[r], other.records[r], static_cast<int>(size));
  }
  return out.finish();
}

// A chain of multiplications, each of which waits for the one before.
std::uint64_t multiply_chain(int rounds) {
  std::uint64_t x = 3;
  for (int i = 0; i < rounds; ++i) {
    x *= x;
#if defined(__GNUC__)
    __asm__ volatile("" : "+r"(x));
#endif
  }
  return x;
}

}  // namespace

void bind_attention(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("attention", "The KV cache's kernels, by instruction set.");
  m.def(
      "kv_block_bytes",
      [](const std::string& kind, int head_size) {
        return kv_block_bytes(kv_kind_of(kind), head_size);
      },
      nb::arg("kind"), nb::arg("head_size"), "Bytes of one page of one kv head.");
  m.def("kv_write", &write, nb::arg("isa"), nb::arg("kind"), nb::arg("blocks"), nb::arg("block"),
        nb::arg("place"), nb::arg("key"), nb::arg("value"),
        "Store a key and a value [D] at a place (0 ... 63) of one of blocks [B, bytes].");
  m.def("attend", &attend, nb::arg("isa"), nb::arg("kind"), nb::arg("queries"), nb::arg("blocks"),
        nb::arg("visible"), nb::arg("repeats") = 1,
        "Maxima [R], sums [R], mixed values [R, D] of queries [R, D] over blocks in order.");
  m.def("merge", &merge, nb::arg("isa"), nb::arg("total"), nb::arg("part"),
        "What two calls of attend returned as one: `part` after `total`.");
  m.def("multiply_chain", &multiply_chain, nb::arg("rounds"),
        "Does nothing but wait, 3 cycles a round on x86 and AArch64, for its time.");
}

}  // namespace smollm2
