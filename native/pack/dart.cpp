#include "pack/dart.h"

namespace smollm2 {
namespace {

constexpr std::uint32_t kOffset = 2166136261U, kPrime = 16777619U, kOtherPrime = 2246822519U;

struct Int8 {
  static constexpr std::size_t bytes = 1;
  static std::int32_t at(const std::uint8_t* values, std::size_t i) {
    return static_cast<std::int8_t>(values[i]);
  }
};

struct Int16 {
  static constexpr std::size_t bytes = 2;
  static std::int32_t at(const std::uint8_t* values, std::size_t i) {
    return static_cast<std::int16_t>(values[2 * i] | values[2 * i + 1] << 8);
  }
};

// Both hashes wait for their own last product, so they are computed side by side.
template <typename Value>
DartHashes of_whole_numbers(const std::uint8_t* values, std::size_t count) {
  std::uint32_t first = kOffset;
  std::uint64_t second = kOffset ^ 0x9e3779b9U;
  for (std::size_t i = 0; i < count; ++i) {
    first = (first ^ static_cast<std::uint32_t>(Value::at(values, i))) * kPrime;
    const auto backward = static_cast<std::uint32_t>(Value::at(values, count - 1 - i));
    second = (second ^ ((backward ^ backward << 5) & 0xffU)) * kOtherPrime;
    second = second << 13 | second >> 19;
  }
  return {first, static_cast<std::uint32_t>(second)};
}

DartHashes of_bf16(const std::uint8_t* values, std::size_t count) {
  std::uint32_t first = kOffset, second = kOffset;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint32_t>(Int16::at(values, i)) & 0xffffU;
    first = (first ^ bits) * kPrime;
    second = (second ^ bits >> 1) * kOtherPrime;
  }
  return {first, second};
}

}  // namespace

std::optional<std::size_t> dart_value_bytes(std::string_view kind) {
  if (kind == "q8") return Int8::bytes;
  if (kind == "q16" || kind == "bf16") return Int16::bytes;
  return std::nullopt;
}

DartHashes dart_hashes(std::string_view kind, const std::uint8_t* values, std::size_t count) {
  if (kind == "q8") return of_whole_numbers<Int8>(values, count);
  return kind == "q16" ? of_whole_numbers<Int16>(values, count) : of_bf16(values, count);
}

}  // namespace smollm2
