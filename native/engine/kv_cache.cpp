#include "engine/kv_cache.h"

#include <new>

namespace smollm2 {
namespace {

// Page numbers are 32 bits wide.
std::size_t times(std::size_t bytes, std::int64_t count) {
  if (count < 0 || count > INT32_MAX ||
      bytes > SIZE_MAX / 2 / static_cast<std::size_t>(count + 1)) {
    throw std::bad_alloc();
  }
  return bytes * static_cast<std::size_t>(count);
}

}  // namespace

KvCache::KvCache(KvKind kind, const Shape& shape, int layers, std::int64_t pages)
    : kind_(kind),
      layers_(layers),
      kv_heads_(shape.kv_heads),
      head_size_(shape.head_size),
      pages_(pages),
      block_bytes_(kv_block_bytes(kind, shape.head_size)),
      page_bytes_(times(block_bytes_, std::int64_t{layers} * shape.kv_heads)),
      memory_(times(page_bytes_, pages), Memory::Pages::huge) {}

}  // namespace smollm2
