// Whole forward passes of tiny models: the same bits however the work is cut.
#include "engine/engine.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "tests/check.h"

namespace smollm2::test {
namespace {

// Query heads that share a kv head in threes, and one by one; sizes that fill no tile.
constexpr Shape kShapes[] = {{53, 64, 96, 6, 2, 16, 1e-5f}, {40, 100, 70, 4, 4, 10, 1e-5f}};
constexpr int kLayers = 2, kPositions = 600;

// A model with what it is made of, and angles for its positions.
struct Tiny {
  template <typename Make>
  Tiny(Random& random, const Shape& shape, Make make) {
    const auto matrix = [&](int rows, int cols) {
      weights.push_back(make(rows, cols));
      return weights.back().matrix;
    };
    const auto gain = [&] {
      gains.push_back(numbers(random, shape.hidden, 2.0f));
      return gains.back().data();
    };
    weights.reserve(7 * kLayers + 1);
    gains.reserve(2 * kLayers + 1);
    model.shape = shape;
    model.embedding = model.head = matrix(shape.vocabulary, shape.hidden);
    for (int i = 0; i < kLayers; ++i) {
      Layer layer{};
      layer.input_norm = gain();
      layer.query = matrix(shape.query_size(), shape.hidden);
      layer.key = matrix(shape.kv_size(), shape.hidden);
      layer.value = matrix(shape.kv_size(), shape.hidden);
      layer.output = matrix(shape.hidden, shape.query_size());
      layer.mlp_norm = gain();
      layer.gate = matrix(shape.mlp, shape.hidden);
      layer.up = matrix(shape.mlp, shape.hidden);
      layer.down = matrix(shape.hidden, shape.mlp);
      model.layers.push_back(layer);
    }
    model.final_norm = gain();
    const int half = shape.head_size / 2;
    for (int i = 0; i < kPositions * half; ++i) {
      const float angle = static_cast<float>(i / half) / static_cast<float>(1 + i % half);
      cosines.push_back(std::cos(angle));
      sines.push_back(std::sin(angle));
    }
  }

  std::vector<Weights> weights;
  std::vector<std::vector<float>> gains;
  std::vector<float> cosines, sines;
  Model model{};
};

// A sequence of ids, with a row of pages; `done` of its tokens are in the cache.
struct Sequence {
  std::vector<std::int32_t> ids, pages;
  int done = 0;
};

// Logits [tokens, V], or hidden states [tokens, C], of the next `counts[i]` tokens of each
// sequence, one after the other.
std::vector<float> forward(Engine& engine, const Tiny& tiny, KvCache& cache,
                           const std::vector<Sequence*>& sequences, const std::vector<int>& counts,
                           Result result = Result::logits) {
  std::vector<std::int32_t> ids, positions;
  Batch batch{0, nullptr, nullptr, tiny.cosines.data(), tiny.sines.data(), {}, {}};
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = *sequences[i];
    batch.runs.push_back({batch.count, counts[i], sequence.done, sequence.pages.data()});
    for (int k = 0; k < counts[i]; ++k, ++batch.count, ++sequence.done) {
      ids.push_back(sequence.ids[static_cast<std::size_t>(sequence.done)]);
      positions.push_back(sequence.done);
      batch.wanted.push_back({batch.count, batch.count});
    }
  }
  batch.ids = ids.data();
  batch.positions = positions.data();
  const Shape& shape = tiny.model.shape;
  const int width = result == Result::hidden ? shape.hidden : shape.vocabulary;
  std::vector<float> out(ids.size() * static_cast<std::size_t>(width));
  engine.forward(batch, cache, out.data(), result);
  return out;
}

Sequence sequence_of(Random& random, const Tiny& tiny, int length, int first_page) {
  Sequence out;
  for (int i = 0; i < length; ++i) {
    out.ids.push_back(random.integer(0, tiny.model.shape.vocabulary - 1));
  }
  out.pages.resize(static_cast<std::size_t>((length + kPage - 1) / kPage));
  std::iota(out.pages.begin(), out.pages.end(), first_page);
  return out;
}

// Logits of two sequences, each in one pass by itself.
std::vector<float> straight(Engine& engine, const Tiny& tiny, KvKind kind, Sequence a, Sequence b) {
  KvCache cache(kind, tiny.model.shape, kLayers, 8);
  const auto whole = [&](Sequence& s) {
    return forward(engine, tiny, cache, {&s}, {static_cast<int>(s.ids.size())});
  };
  std::vector<float> out = whole(a);
  const std::vector<float> second = whole(b);
  out.insert(out.end(), second.begin(), second.end());
  return out;
}

// The same in a batch of both, cut anywhere, over pages in another order.
std::vector<float> cut(Engine& engine, const Tiny& tiny, KvKind kind, Sequence a, Sequence b,
                       Random& random) {
  KvCache cache(kind, tiny.model.shape, kLayers, 8);
  std::reverse(a.pages.begin(), a.pages.end());
  std::vector<float> of_a, of_b;
  const auto left = [](const Sequence& s) { return static_cast<int>(s.ids.size()) - s.done; };
  while (left(a) > 0 || left(b) > 0) {
    std::vector<Sequence*> sequences;
    std::vector<int> counts;
    for (Sequence* s : {&a, &b}) {
      if (left(*s) == 0) continue;
      sequences.push_back(s);
      const int most = std::min(left(*s), random.one_of<int>({1, 1, 30, 90}));
      counts.push_back(random.integer(1, most));
    }
    const std::vector<float> logits = forward(engine, tiny, cache, sequences, counts);
    auto from = logits.begin();
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      std::vector<float>& to = sequences[i] == &a ? of_a : of_b;
      const auto count = counts[i] * tiny.model.shape.vocabulary;
      to.insert(to.end(), from, from + count);
      from += count;
    }
  }
  of_a.insert(of_a.end(), of_b.begin(), of_b.end());
  return of_a;
}

void compare_all(Random& random, const Tiny& tiny, KvKind kv, const std::string& what) {
  const Sequence a = sequence_of(random, tiny, 90, 0), b = sequence_of(random, tiny, 9, 4);
  std::vector<float> plain;
  for (const Kernels* table : tables()) {
    Engine alone(tiny.model, 1, *table);
    const std::vector<float> expected = straight(alone, tiny, kv, a, b);
    if (plain.empty()) plain = expected;
    expect_same(expected, plain, std::string(table->name) + " " + what);
    for (const int threads : {1, 2, 3, 4}) {
      Engine engine(tiny.model, threads, *table);
      const std::string said =
          std::string(table->name) + " " + what + " by " + std::to_string(threads) + " threads";
      expect_same(cut(engine, tiny, kv, a, b, random), expected, said);
    }
  }
}

void any_cut_gives_the_same_bits() {
  Random random(40);
  for (const Shape& shape : kShapes) {
    for (const Kind kind : kKinds) {
      const Tiny tiny(random, shape,
                      [&](int rows, int cols) { return random_weights(random, kind, rows, cols); });
      const KvKind kv = kKvKinds[static_cast<int>(kind) % 3];
      compare_all(random, tiny, kv, name_of(kind) + " with a cache of " + name_of(kv));
    }
  }
}

void any_bytes_are_weights() {
  Random random(41);
  for (const Kind kind : kKinds) {
    for (const KvKind kv : kKvKinds) {
      const Tiny tiny(random, kShapes[0],
                      [&](int rows, int cols) { return any_weights(random, kind, rows, cols); });
      const Sequence a = sequence_of(random, tiny, 70, 0), b = sequence_of(random, tiny, 3, 4);
      for (const Kernels* table : tables()) {
        Engine one(tiny.model, 1, *table), two(tiny.model, 2, *table);
        expect_same(straight(two, tiny, kv, a, b), straight(one, tiny, kv, a, b), name_of(kind));
      }
    }
  }
}

// So long that several workers share the pages of one head.
void long_sequences_are_shared_out() {
  Random random(43);
  const Tiny tiny(random, kShapes[0],
                  [&](int rows, int cols) { return random_weights(random, Kind::q8, rows, cols); });
  const Kernels& table = *tables().back();
  std::vector<float> expected;
  for (const int threads : {1, 2, 5}) {
    Engine engine(tiny.model, threads, table);
    KvCache cache(KvKind::int16, tiny.model.shape, kLayers, 10);
    Sequence s = sequence_of(random, tiny, 560, 0);
    for (std::size_t i = 0; i < s.ids.size(); ++i) s.ids[i] = static_cast<std::int32_t>(i % 50);
    std::vector<float> got;
    for (const int count : {400, 1, 1, 155, 1, 2})
      got = forward(engine, tiny, cache, {&s}, {count});
    if (expected.empty()) expected = got;
    expect_same(got, expected, std::to_string(threads) + " threads");
  }
}

// Few rows and many, by any number of threads; the head of float weights makes logits of them.
void hidden_states_are_what_the_head_gets() {
  Random random(45);
  const Tiny tiny(random, kShapes[0], [&](int rows, int cols) {
    return random_weights(random, Kind::f32, rows, cols);
  });
  const Shape& shape = tiny.model.shape;
  const int count = 70, last = tiles(shape.vocabulary), stride = last * kTileRows;
  const Sequence start = sequence_of(random, tiny, count, 0);
  std::vector<float> plain;
  for (const Kernels* table : tables()) {
    for (const int threads : {1, 3}) {
      Engine engine(tiny.model, threads, *table);
      KvCache cache(KvKind::f32, shape, kLayers, 2);
      std::vector<float> hidden, logits;
      for (const int first : {67, 3}) {
        Sequence once = start, again = start;
        once.done = again.done = first == 3 ? 67 : 0;
        const auto of = forward(engine, tiny, cache, {&once}, {first}, Result::hidden);
        const auto to = forward(engine, tiny, cache, {&again}, {first});
        hidden.insert(hidden.end(), of.begin(), of.end());
        logits.insert(logits.end(), to.begin(), to.end());
      }
      if (plain.empty()) plain = hidden;
      expect_same(hidden, plain, std::string(table->name) + " by " + std::to_string(threads));
      std::vector<float> products(static_cast<std::size_t>(count * stride)), expected;
      table->linear_float(tiny.model.head, hidden.data(), shape.hidden, count, 0, last,
                          {products.data(), stride}, nullptr);
      for (auto row = products.begin(); row != products.end(); row += stride) {
        expected.insert(expected.end(), row, row + shape.vocabulary);
      }
      expect_same(logits, expected, std::string(table->name) + ": logits of hidden states");
    }
  }
}

// Callers with a cache each, on one engine and its threads.
void callers_take_turns() {
  Random random(44);
  const Tiny tiny(random, kShapes[0],
                  [&](int rows, int cols) { return random_weights(random, Kind::q8, rows, cols); });
  const Sequence a = sequence_of(random, tiny, 40, 0), b = sequence_of(random, tiny, 5, 4);
  Engine engine(tiny.model, 2, *tables().back());
  const std::vector<float> expected = straight(engine, tiny, KvKind::int8, a, b);
  std::vector<std::vector<float>> got(3);
  std::vector<std::thread> callers;
  for (std::vector<float>& logits : got) {
    callers.emplace_back([&] { logits = straight(engine, tiny, KvKind::int8, a, b); });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::vector<float>& logits : got) expect_same(logits, expected, "a caller");
}

void the_cache_is_used() {
  Random random(42);
  const Tiny tiny(random, kShapes[0], [&](int rows, int cols) {
    return random_weights(random, Kind::f32, rows, cols);
  });
  const Sequence a = sequence_of(random, tiny, 20, 0);
  Sequence b = a;
  b.ids[0] = (b.ids[0] + 1) % tiny.model.shape.vocabulary;
  Engine engine(tiny.model, 2, *tables().back());
  const std::vector<float> one = straight(engine, tiny, KvKind::f32, a, a);
  const std::vector<float> other = straight(engine, tiny, KvKind::f32, b, b);
  const auto last = one.size() / 2 - 1;
  expect(std::isfinite(one[last]) && one[last] != other[last], "the first token is not seen");
}

}  // namespace

Tests engine_tests() {
  return {
      {"engine: any cut and any number of threads give the same bits", any_cut_gives_the_same_bits},
      {"engine: any bytes are weights", any_bytes_are_weights},
      {"engine: long sequences are shared out alike", long_sequences_are_shared_out},
      {"engine: callers take turns", callers_take_turns},
      {"engine: hidden states are what the head gets", hidden_states_are_what_the_head_gets},
      {"engine: the last token sees the first", the_cache_is_used},
  };
}

}  // namespace smollm2::test
