// Attention over pages of cached keys and values: every instruction set against the plain one.
#include <algorithm>
#include <cstring>

#include "tests/check.h"

namespace smollm2::test {
namespace {

// Pages of one kv head, written place by place with one table.
struct Pages {
  Pages(const Kernels& table, KvKind kind, int count, int head_size, const std::vector<float>& keys,
        const std::vector<float>& values)
      : block_bytes(kv_block_bytes(kind, head_size)),
        bytes(block_bytes * static_cast<std::size_t>(count)) {
    for (int page = 0; page < count; ++page) {
      std::uint8_t* block = bytes.get() + block_bytes * static_cast<std::size_t>(page);
      blocks.push_back(block);
      for (int place = 0; place < kPage; ++place) {
        const int at = (page * kPage + place) * head_size;
        table.kv_write(kind, block, place, keys.data() + at, values.data() + at, head_size);
      }
    }
  }
  std::size_t size() const { return block_bytes * blocks.size(); }

  std::size_t block_bytes;
  Buffer<std::uint8_t> bytes;
  std::vector<const std::uint8_t*> blocks;
};

struct Case {
  KvKind kind;
  int head_size, rows, pages;
  std::vector<float> queries, keys, values;
  std::vector<int> visible;
};

Case any_case(Random& random, KvKind kind, int head_size, int rows) {
  Case out{kind, head_size, rows, random.integer(1, 7), {}, {}, {}, {}};
  const int places = out.pages * kPage;
  out.queries = numbers(random, rows * head_size, random.one_of<float>({0.01f, 1.0f, 8.0f}));
  out.keys = numbers(random, places * head_size);
  out.values = numbers(random, places * head_size);
  for (int r = 0; r < rows; ++r) out.visible.push_back(random.integer(0, places));
  return out;
}

// Of each row: maximum, sum, mixed values; in two calls where `cut` pages come first.
std::vector<float> attended(const Kernels& table, const Case& c, const Pages& pages, int first,
                            int rows, int cut = 0) {
  const auto size = static_cast<std::size_t>(c.head_size);
  std::vector<float> mixed(static_cast<std::size_t>(rows) * size);
  std::vector<Partial> partials;
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    partials.push_back({-INFINITY, 0, mixed.data() + r * size});
  }
  const auto attend = [&](int page, int count) {
    std::vector<int> visible;
    for (int r = first; r < first + rows; ++r) {
      const int left = c.visible[static_cast<std::size_t>(r)] - page * kPage;
      visible.push_back(std::clamp(left, 0, count * kPage));
    }
    table.attend(c.kind, c.queries.data() + first * c.head_size, rows, pages.blocks.data() + page,
                 count, c.pages - page - count, visible.data(), c.head_size, partials.data());
  };
  if (cut > 0) attend(0, cut);
  if (cut < c.pages) attend(cut, c.pages - cut);
  std::vector<float> out;
  for (const Partial& partial : partials) {
    out.push_back(partial.maximum);
    out.push_back(partial.sum);
    out.insert(out.end(), partial.mixed, partial.mixed + size);
  }
  return out;
}

std::string described(const Kernels& table, const Case& c) {
  return std::string(table.name) + " " + name_of(c.kind) + " of " + std::to_string(c.head_size) +
         ", " + std::to_string(c.rows) + " rows, " + std::to_string(c.pages) + " pages";
}

void compare_all(const Case& c) {
  const Kernels& plain = *tables()[0];
  const Pages pages(plain, c.kind, c.pages, c.head_size, c.keys, c.values);
  const std::vector<float> expected = attended(plain, c, pages, 0, c.rows);
  for (const Kernels* table : tables()) {
    const Pages written(*table, c.kind, c.pages, c.head_size, c.keys, c.values);
    expect(std::memcmp(written.bytes.get(), pages.bytes.get(), pages.size()) == 0,
           described(*table, c) + " are written otherwise");
    expect_same(attended(*table, c, pages, 0, c.rows), expected, described(*table, c));
  }
}

void same_bits_everywhere() {
  Random random(20);
  for (const KvKind kind : kKvKinds) {
    for (const int head_size : {2, 10, 16, 24, 64, 64, 64, 80, 128, 256}) {
      compare_all(any_case(random, kind, head_size, random.integer(1, 8)));
    }
    compare_all(any_case(random, kind, 64, 200));  // more rows than are prepared at a time
  }
}

// Mixed values over their sum; what a sum that is no number is made of may be anything.
std::vector<float> normalised(const std::vector<float>& rows, int head_size) {
  const auto each = static_cast<std::size_t>(head_size) + 2;
  std::vector<float> out;
  for (std::size_t at = 0; at < rows.size(); at += each) {
    const float sum = rows[at + 1];
    out.push_back(sum);
    for (std::size_t d = 2; d < each; ++d) {
      out.push_back(std::isnan(sum) ? sum : rows[at + d] / sum);
    }
  }
  return out;
}

void hard_numbers_are_alike() {
  Random random(21);
  for (const KvKind kind : kKvKinds) {
    for (int i = 0; i < 6; ++i) {
      Case c = any_case(random, kind, 16, 3);
      const int one_in = random.one_of<int>({5000, 100});
      c.queries = hard_numbers(random, c.rows * c.head_size, one_in);
      c.keys = hard_numbers(random, c.pages * kPage * c.head_size, one_in);
      c.values = hard_numbers(random, c.pages * kPage * c.head_size, one_in);
      const Pages pages(*tables()[0], kind, c.pages, c.head_size, c.keys, c.values);
      std::vector<float> expected;
      for (const Kernels* table : tables()) {
        const std::vector<float> got = normalised(attended(*table, c, pages, 0, c.rows), 16);
        if (expected.empty()) expected = got;
        expect_same(got, expected, described(*table, c));
      }
    }
  }
}

// Against float64, in base 2.
void attention_is_softmax() {
  Random random(22);
  for (const KvKind kind : kKvKinds) {
    Case c = any_case(random, kind, 32, 5);
    c.queries = numbers(random, c.rows * c.head_size);
    const Pages pages(*tables()[0], kind, c.pages, c.head_size, c.keys, c.values);
    const std::vector<float> got = attended(*tables()[0], c, pages, 0, c.rows);
    const auto size = static_cast<std::size_t>(c.head_size);
    for (std::size_t r = 0; r < static_cast<std::size_t>(c.rows); ++r) {
      std::vector<double> mixed(size);
      double total = 0;
      for (std::size_t place = 0; place < static_cast<std::size_t>(c.visible[r]); ++place) {
        double score = 0;
        for (std::size_t d = 0; d < size; ++d) {
          score += static_cast<double>(c.queries[r * size + d]) *
                   static_cast<double>(c.keys[place * size + d]);
        }
        const double weight = std::exp2(score);
        total += weight;
        for (std::size_t d = 0; d < size; ++d) {
          mixed[d] += weight * static_cast<double>(c.values[place * size + d]);
        }
      }
      const float* row = got.data() + r * (size + 2);
      for (std::size_t d = 0; d < size && total > 0; ++d) {
        expect(std::fabs(static_cast<double>(row[d + 2] / row[1]) - mixed[d] / total) < 2e-2,
               name_of(kind) + " is off");
      }
    }
  }
}

void a_row_depends_on_itself_alone() {
  Random random(23);
  for (const Kernels* table : tables()) {
    for (const KvKind kind : kKvKinds) {
      const Case c = any_case(random, kind, 64, 11);
      const Pages pages(*tables()[0], kind, c.pages, c.head_size, c.keys, c.values);
      const std::vector<float> whole = attended(*table, c, pages, 0, c.rows);
      for (int rows = 1; rows < c.rows; ++rows) {
        const int first = random.integer(0, c.rows - rows);
        const std::vector<float> part = attended(*table, c, pages, first, rows);
        expect_same(part.data(), whole.data() + first * (c.head_size + 2), part.size(),
                    described(*table, c));
      }
    }
  }
}

void pages_can_come_in_several_calls() {
  Random random(25);
  for (const Kernels* table : tables()) {
    for (const KvKind kind : kKvKinds) {
      Case c = any_case(random, kind, 24, 7);
      while (c.pages <= kPagesAtOnce) c = any_case(random, kind, 24, 7);
      const Pages pages(*tables()[0], kind, c.pages, c.head_size, c.keys, c.values);
      expect_same(attended(*table, c, pages, 0, c.rows, kPagesAtOnce),
                  attended(*table, c, pages, 0, c.rows), described(*table, c));
      table->fetch(pages.bytes.get(), pages.size());  // changes nothing
    }
  }
}

void merging_is_alike() {
  Random random(24);
  for (const int size : {2, 24, 64}) {
    for (int i = 0; i < 20; ++i) {
      std::vector<float> total = numbers(random, size + 2, 4.0f), expected;
      std::vector<float> part = numbers(random, size + 2, 4.0f);
      if (i % 4 == 1) total[0] = -INFINITY, total[1] = 0;
      if (i % 4 == 2) part[0] = -INFINITY, part[1] = 0;
      for (const Kernels* table : tables()) {
        std::vector<float> out = total;
        Partial to{out[0], out[1], out.data() + 2};
        table->merge(to, {part[0], part[1], part.data() + 2}, size);
        out[0] = to.maximum, out[1] = to.sum;
        if (expected.empty()) expected = out;
        expect_same(out, expected, std::string(table->name) + " merge");
      }
    }
  }
}

}  // namespace

Tests attention_tests() {
  return {
      {"attention: every instruction set gives the bits of the plain one", same_bits_everywhere},
      {"attention: what is no number is alike everywhere", hard_numbers_are_alike},
      {"attention: it is the softmax of float64", attention_is_softmax},
      {"attention: a row depends on itself alone", a_row_depends_on_itself_alone},
      {"attention: pages can come in several calls", pages_can_come_in_several_calls},
      {"attention: merging is alike everywhere", merging_is_alike},
  };
}

}  // namespace smollm2::test
