// The engine for Python: everything that is used as an index is checked here.
#include "engine/engine.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <map>
#include <tuple>
#include <utility>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/released.h"
#include "runtime/affinity.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace smollm2 {
namespace {

using Ints = In<std::int32_t, 1>;
using Table = In<std::int32_t, 2>;
using Angles = In<float, 2>;
using Gain = AnyIn;
using Packed = std::tuple<std::string, int, int, AnyIn>;  // kind, rows, cols, bytes

void need(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

std::string text(std::int64_t number) { return std::to_string(number); }

int size_of(std::size_t size) {
  need(size <= INT_MAX, "an array of " + std::to_string(size) + " values is too long");
  return static_cast<int>(size);
}

KvKind kv_kind_of(const std::string& name) {
  static constexpr const char* names[] = {"f32", "int16", "int8"};
  for (int i = 0; i < 3; ++i) {
    if (name == names[i]) return static_cast<KvKind>(i);
  }
  throw std::invalid_argument("a KV cache is f32, int16 or int8, not " + name);
}

// Takes tensors in the order of a file, and checks their shapes.
class Tensors {
 public:
  Tensors(const std::vector<Packed>& matrices, const std::vector<Gain>& gains)
      : matrices_(matrices), gains_(gains) {}

  Matrix matrix(int rows, int cols) {
    need(matrix_ < matrices_.size(), "too few matrices: got " + std::to_string(matrix_));
    const auto& [kind, own_rows, own_cols, bytes] = matrices_[matrix_];
    need(own_rows == rows && own_cols == cols, "matrix " + std::to_string(matrix_) + " must be " +
                                                   text(rows) + " x " + text(cols) + ": got " +
                                                   text(own_rows) + " x " + text(own_cols));
    const Matrix matrix = matrix_of(bytes, kind, rows, cols);
    need(reinterpret_cast<std::uintptr_t>(matrix.data) % 64 == 0,
         "matrix " + std::to_string(matrix_) + " must be aligned to 64 bytes");
    ++matrix_;
    return matrix;
  }

  const float* gain(int size) {
    need(gain_ < gains_.size(), "too few norms: got " + std::to_string(gain_));
    const auto gains = checked<const float, 1>(gains_[gain_], "gains");
    need(gains.size() == static_cast<std::size_t>(size),
         "norm " + std::to_string(gain_) + " must have " + text(size) + " gains: got " +
             std::to_string(gains.size()));
    ++gain_;
    return gains.data();
  }

  bool has_matrix() const { return matrix_ < matrices_.size(); }
  void end() const {
    need(matrix_ == matrices_.size() && gain_ == gains_.size(),
         "more tensors than the model has: " + std::to_string(matrices_.size()) + " matrices and " +
             std::to_string(gains_.size()) + " norms");
  }

 private:
  const std::vector<Packed>& matrices_;
  const std::vector<Gain>& gains_;
  std::size_t matrix_ = 0, gain_ = 0;
};

Shape shape_of(const std::map<std::string, int>& numbers, float epsilon) {
  const auto get = [&](const char* name) {
    const auto found = numbers.find(name);
    need(found != numbers.end() && found->second >= 1 && found->second <= 1 << 24,
         std::string("the model needs a positive ") + name);
    return found->second;
  };
  const Shape shape{get("vocab_size"),
                    get("hidden_size"),
                    get("intermediate_size"),
                    get("num_attention_heads"),
                    get("num_key_value_heads"),
                    get("head_dim"),
                    epsilon};
  need(shape.heads % shape.kv_heads == 0, "the kv heads must divide the query heads");
  need(std::int64_t{shape.heads} * shape.head_size <= 1 << 24, "the heads are too large");
  kv_block_bytes(KvKind::f32, shape.head_size);
  return shape;
}

Model model_of(const Shape& shape, int layers, Tensors& tensors) {
  Model model{shape, tensors.matrix(shape.vocabulary, shape.hidden), {}, nullptr, {}};
  for (int i = 0; i < layers; ++i) {
    Layer layer{};
    layer.input_norm = tensors.gain(shape.hidden);
    layer.query = tensors.matrix(shape.query_size(), shape.hidden);
    layer.key = tensors.matrix(shape.kv_size(), shape.hidden);
    layer.value = tensors.matrix(shape.kv_size(), shape.hidden);
    layer.output = tensors.matrix(shape.hidden, shape.query_size());
    layer.mlp_norm = tensors.gain(shape.hidden);
    layer.gate = tensors.matrix(shape.mlp, shape.hidden);
    layer.up = tensors.matrix(shape.mlp, shape.hidden);
    layer.down = tensors.matrix(shape.hidden, shape.mlp);
    model.layers.push_back(layer);
  }
  model.final_norm = tensors.gain(shape.hidden);
  model.head =
      tensors.has_matrix() ? tensors.matrix(shape.vocabulary, shape.hidden) : model.embedding;
  tensors.end();
  return model;
}

Model model_of(const std::map<std::string, int>& numbers, float epsilon,
               const std::vector<Packed>& matrices, const std::vector<Gain>& gains) {
  const auto layers = numbers.find("num_hidden_layers");
  need(layers != numbers.end() && layers->second >= 1, "the model needs layers");
  Tensors tensors(matrices, gains);
  return model_of(shape_of(numbers, epsilon), layers->second, tensors);
}

const Kernels& table_or_best(const std::string& isa) {
  return isa.empty() ? kernels() : table_of(isa);
}

int threads_or_default(int threads) { return threads > 0 ? threads : available_cores(); }

// An engine with the arrays that its weights lie in.
struct Loaded {
  Loaded(const std::map<std::string, int>& numbers, float epsilon, std::vector<Packed> matrices_,
         std::vector<Gain> gains_, int threads, const std::string& isa)
      : matrices(std::move(matrices_)),
        gains(std::move(gains_)),
        engine(model_of(numbers, epsilon, matrices, gains), threads_or_default(threads),
               table_or_best(isa)) {}

  std::vector<Packed> matrices;
  std::vector<Gain> gains;
  Engine engine;
};

// What forward() or hidden() was given, checked.
struct Call {
  const Model& model;
  const KvCache& cache;
  Ints ids, positions;
  Angles cosines, sines;
  Table runs;   // [R, 3]: count, place, row of pages
  Table pages;  // [rows, pages of a row]
  Ints wanted;

  void check() const {
    const Shape& shape = model.shape;
    need(cache.fits(shape, static_cast<int>(model.layers.size())),
         "the KV cache was made for another model");
    need(positions.size() == ids.size() && ids.size() > 0, "a position for each of the ids");
    need(cosines.shape(1) == static_cast<std::size_t>(shape.head_size / 2) &&
             sines.shape(1) == cosines.shape(1) && sines.shape(0) == cosines.shape(0),
         "cosines and sines of half a head for each position");
    const int known = size_of(cosines.shape(0));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const int id = ids.data()[i], position = positions.data()[i];
      need(id >= 0 && id < shape.vocabulary,
           "token id " + text(id) + " is not in a vocabulary of " + text(shape.vocabulary));
      need(position >= 0 && position < known,
           "position " + text(position) + " has no angles: there are " + text(known));
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const int token = wanted.data()[i];
      need(token >= 0 && static_cast<std::size_t>(token) < ids.size(),
           "token " + text(token) + " of a batch of " + std::to_string(ids.size()));
    }
    check_runs();
  }

  void check_runs() const {
    need(runs.shape(1) == 3, "a run has a count, a place and a row of pages");
    const std::int64_t room = static_cast<std::int64_t>(pages.shape(1)) * kPage;
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < runs.shape(0); ++i) {
      const std::int32_t* run = runs.data() + 3 * i;
      need(run[0] >= 1 && run[1] >= 0 && std::int64_t{run[0]} + run[1] <= room,
           "places " + text(run[1]) + " to " + text(std::int64_t{run[0]} + run[1]) +
               " of a row of " + text(room));
      need(run[2] >= 0 && static_cast<std::size_t>(run[2]) < pages.shape(0),
           "row " + text(run[2]) + " of " + std::to_string(pages.shape(0)) + " rows of pages");
      const std::int32_t* of_row = pages.data() + static_cast<std::size_t>(run[2]) * pages.shape(1);
      for (int page = 0; page <= (run[0] + run[1] - 1) / kPage; ++page) {
        need(of_row[page] >= 0 && of_row[page] < cache.pages(),
             "page " + text(of_row[page]) + " of a KV cache of " + text(cache.pages()));
      }
      tokens += run[0];
    }
    need(tokens == static_cast<std::int64_t>(ids.size()), "the runs must cover all tokens");
  }

  // Tokens [first, last) as a batch.
  Batch part(int first, int last) const {
    Batch batch{last - first,
                ids.data() + first,
                positions.data() + first,
                cosines.data(),
                sines.data(),
                {},
                {}};
    int start = 0;
    for (std::size_t i = 0; i < runs.shape(0); ++i) {
      const std::int32_t* run = runs.data() + 3 * i;
      const int from = std::max(start, first), to = std::min(start + run[0], last);
      if (from < to) {
        const std::int32_t* of_row =
            pages.data() + static_cast<std::size_t>(run[2]) * pages.shape(1);
        batch.runs.push_back({from - first, to - from, run[1] + from - start, of_row});
      }
      start += run[0];
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const int token = wanted.data()[i];
      if (token >= first && token < last) {
        batch.wanted.push_back({token - first, static_cast<std::int64_t>(i)});
      }
    }
    return batch;
  }
};

// Between two parts a signal may end it: what was stored until then does not count yet.
template <Result result>
Out<float> forward(Loaded& loaded, KvCache& cache, const AnyIn& ids, const AnyIn& positions,
                   const AnyIn& cosines, const AnyIn& sines, const AnyIn& runs, const AnyIn& pages,
                   const AnyIn& wanted) {
  Engine& engine = loaded.engine;
  const Call call{engine.model(),
                  cache,
                  checked<const std::int32_t, 1>(ids, "ids"),
                  checked<const std::int32_t, 1>(positions, "positions"),
                  checked<const float, 2>(cosines, "cosines"),
                  checked<const float, 2>(sines, "sines"),
                  checked<const std::int32_t, 2>(runs, "runs"),
                  checked<const std::int32_t, 2>(pages, "pages"),
                  checked<const std::int32_t, 1>(wanted, "wanted")};
  call.check();
  const Shape& shape = engine.model().shape;
  const auto columns =
      static_cast<std::size_t>(result == Result::hidden ? shape.hidden : shape.vocabulary);
  auto* out = aligned_new<float>(call.wanted.size() * columns);
  const nb::capsule owner = aligned_owner(out);
  engine.notice_fork();
  const int count = size_of(call.ids.size());
  for (int first = 0; first < count; first += kMostTokens) {
    {
      const Released released;
      engine.forward(call.part(first, std::min(first + kMostTokens, count)), cache, out, result);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return Out<float>(out, {call.wanted.size(), columns}, owner);
}

std::map<std::string, std::pair<double, double>> times_of(const Profile& profile) {
  std::map<std::string, std::pair<double, double>> times;
  for (std::size_t i = 0; i < Profile::phases; ++i) {
    times[Profile::names[i]] = {profile.work[i], profile.wait[i]};
  }
  return times;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<KvCache>(m, "KvCache", "Pages of keys and values, each of 64 tokens.")
      .def_prop_ro("pages", &KvCache::pages)
      .def_prop_ro("page_bytes", &KvCache::page_bytes);
  nb::class_<Loaded>(m, "Engine", "A model that runs batches on its own threads.")
      .def(nb::init<const std::map<std::string, int>&, float, std::vector<Packed>,
                    std::vector<Gain>, int, const std::string&>(),
           "numbers"_a, "epsilon"_a, "matrices"_a, "gains"_a, "threads"_a = 0, "isa"_a = "",
           "`numbers` are those of config.json; matrices (kind, rows, cols, packed bytes) and "
           "gains of norms come in the order of a file.")
      .def_prop_ro("threads", [](const Loaded& loaded) { return loaded.engine.threads(); })
      .def_prop_ro("isa",
                   [](const Loaded& loaded) { return std::string(loaded.engine.kernels().name); })
      .def(
          "new_cache",
          [](const Loaded& loaded, const std::string& kind, std::int64_t pages) {
            const Model& model = loaded.engine.model();
            return KvCache(kv_kind_of(kind), model.shape, static_cast<int>(model.layers.size()),
                           pages);
          },
          "kind"_a, "pages"_a, "Memory for pages; it is taken as it is used.")
      .def("forward", &forward<Result::logits>, "cache"_a, "ids"_a, "positions"_a, "cosines"_a,
           "sines"_a, "runs"_a, "pages"_a, "wanted"_a,
           "Logits [W, V] of the wanted tokens. `runs` [R, 3] are the sequences of the batch, in "
           "order: tokens, place of the first, row of `pages` [rows, pages of a row].")
      .def("hidden", &forward<Result::hidden>, "cache"_a, "ids"_a, "positions"_a, "cosines"_a,
           "sines"_a, "runs"_a, "pages"_a, "wanted"_a,
           "Hidden states [W, C] of the wanted tokens after the final norm; else as forward().")
      .def(
          "profile",
          [](Loaded& loaded, bool enabled) {
            Profile& profile = loaded.engine.profile();
            const auto times = times_of(profile);
            profile = Profile{};
            profile.enabled = enabled;
            return times;
          },
          "enabled"_a,
          "Seconds of each phase since the last call, (work, waiting); goes on where `enabled`.");
}

}  // namespace smollm2
