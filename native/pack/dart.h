// Hashes of tensors in the Dart package's files: src/smollm2/formats/dart.py describes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace smollm2 {

struct DartHashes {
  std::uint32_t first;
  std::uint32_t second;
};

// Bytes of a value by the name of its kind: q8, q16 or bf16.
std::optional<std::size_t> dart_value_bytes(std::string_view kind);

// The hashes of `count` little-endian values of a kind that there is.
DartHashes dart_hashes(std::string_view kind, const std::uint8_t* values, std::size_t count);

}  // namespace smollm2
