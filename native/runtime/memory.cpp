#include "runtime/memory.h"

#include <cstdint>
#include <new>
#include <utility>

#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace smollm2 {
namespace {

constexpr std::size_t kAlignment = std::size_t{2} << 20;

void* reserve(std::size_t bytes) {
#if defined(_WIN32)
  return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
  flags |= MAP_NORESERVE;
#endif
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  return base == MAP_FAILED ? nullptr : base;
#endif
}

void give_back(void* base, [[maybe_unused]] std::size_t bytes) {
#if defined(_WIN32)
  VirtualFree(base, 0, MEM_RELEASE);
#else
  munmap(base, bytes);
#endif
}

}  // namespace

Memory::Memory(std::size_t bytes, [[maybe_unused]] Pages pages) : size_(bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - kAlignment) throw std::bad_alloc();
  reserved_ = bytes + kAlignment;
  base_ = reserve(reserved_);
  if (base_ == nullptr) throw std::bad_alloc();
  const auto start = reinterpret_cast<std::uintptr_t>(base_);
  const std::uintptr_t aligned = (start + kAlignment - 1) / kAlignment * kAlignment;
  data_ = static_cast<std::uint8_t*>(base_) + (aligned - start);
#if defined(MADV_HUGEPAGE)
  if (pages == Pages::huge) madvise(data_, size_, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() {
  if (base_ != nullptr) give_back(base_, reserved_);
}

Memory::Memory(Memory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      reserved_(std::exchange(other.reserved_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(reserved_, other.reserved_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace smollm2
