// Memory that comes from the operating system by the page.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smollm2 {

// A zeroed block, aligned to 2 MB, that takes physical memory only where it is touched.
class Memory {
 public:
  enum class Pages : std::uint8_t { small, huge };

  Memory() = default;
  // Throws std::bad_alloc where the system refuses. Huge pages are asked for, not insisted on.
  Memory(std::size_t bytes, Pages pages);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void* base_ = nullptr;
  std::size_t reserved_ = 0;
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace smollm2
