#include <stdexcept>
#include <string>

#include "kernels/kernels.h"

namespace smollm2 {

std::size_t kv_block_bytes(KvKind kind, int head_size) {
  if (head_size < 2 || head_size > kMaxHeadSize || head_size % 2 != 0) {
    throw std::invalid_argument("a head size of " + std::to_string(head_size) +
                                " is not an even number in 2 ... " + std::to_string(kMaxHeadSize));
  }
  const auto size = static_cast<std::size_t>(head_size);
  const std::size_t columns = (size + kTileRows - 1) / kTileRows * kTileRows;
  switch (kind) {
    case KvKind::f32:
      return kPage * (size + columns) * sizeof(float);
    case KvKind::int16:
      return kPage * (2 * size + columns + 2 * sizeof(float));
    case KvKind::int8:
      return kPage * ((size + 3) / 4 * 4 + columns + 2 * sizeof(float));
  }
  return 0;
}

}  // namespace smollm2
