// Memory of a KV cache: a pool of pages, each with all layers and kv heads of 64 tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/model.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"

namespace smollm2 {

// A page's blocks lie side by side, layer by layer and kv head by kv head, so that the memory in
// use follows the number of pages in use.
class KvCache {
 public:
  KvCache(KvKind kind, const Shape& shape, int layers, std::int64_t pages);

  KvKind kind() const { return kind_; }
  std::int64_t pages() const { return pages_; }
  std::size_t block_bytes() const { return block_bytes_; }
  std::size_t page_bytes() const { return page_bytes_; }
  // Whether it was made for a model of these numbers.
  bool fits(const Shape& shape, int layers) const {
    return kv_heads_ == shape.kv_heads && head_size_ == shape.head_size && layers_ == layers;
  }

  std::uint8_t* block(std::int64_t page, int layer, int head) const {
    const int at = layer * kv_heads_ + head;
    return memory_.data() + static_cast<std::size_t>(page) * page_bytes_ +
           static_cast<std::size_t>(at) * block_bytes_;
  }

 private:
  KvKind kind_;
  int layers_, kv_heads_, head_size_;
  std::int64_t pages_;
  std::size_t block_bytes_;
  std::size_t page_bytes_;
  Memory memory_;
};

}  // namespace smollm2
