// An open verbs device and what is registered with it.
#pragma once
#include <stdarg.h>
#include <stdio.h>

#include <atomic>
#include <memory>
#include <vector>

#include "../../algorithms/device/platform.h"
#include "ib.h"
#include "ib_abi.h"

namespace commrt::ib {

constexpr u32 MOST_MEMORIES = 2048, NUMBER_SHIFT = 48;

const Verbs& verbs();  // once it is loaded

inline int refuse(cr_ib_why* why, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(why->text, sizeof why->text, format, arguments);
  va_end(arguments);
  return -1;
}

// Registered memory of one rank, by number. Entries are set once, and may be looked up meanwhile.
class Memories {
 public:
  struct Entry {
    u64 address;
    std::atomic<u64> nbytes;
    u32 key;
  };

  Memories() : entries_(new Entry[MOST_MEMORIES]()) {}

  bool set(u32 number, u64 address, u64 nbytes, u32 key) {
    if (number >= MOST_MEMORIES || !nbytes || nbytes > 1ull << NUMBER_SHIFT || address + nbytes < address) return false;
    if (entries_[number].nbytes.load(std::memory_order_relaxed)) return false;
    entries_[number].address = address, entries_[number].key = key;
    entries_[number].nbytes.store(nbytes, std::memory_order_release);
    if (number >= count_.load(std::memory_order_relaxed)) count_.store(number + 1, std::memory_order_release);
    return true;
  }

  // Where an offset of a port leads. False: outside.
  bool find(u64 offset, u64 nbytes, u64& address, u32& key) const {
    u64 number = offset >> NUMBER_SHIFT, within = offset & ((1ull << NUMBER_SHIFT) - 1);
    if (number >= MOST_MEMORIES) return false;
    const Entry& e = entries_[number];
    u64 size = e.nbytes.load(std::memory_order_acquire);
    if (within > size || nbytes > size - within) return false;
    return address = e.address + within, key = e.key, true;
  }

  // The entry in which all these bytes of this process lie, or null.
  const Entry* holding(u64 address, u64 nbytes) const {
    for (u32 k = 0, n = count_.load(std::memory_order_acquire); k < n; k++) {
      u64 size = entries_[k].nbytes.load(std::memory_order_acquire), within = address - entries_[k].address;
      if (within < size && nbytes <= size - within) return &entries_[k];
    }
    return nullptr;
  }

 private:
  std::unique_ptr<Entry[]> entries_;
  std::atomic<u32> count_{0};
};

}  // namespace commrt::ib

struct cr_ib {
  commrt::ib::Context* context = nullptr;
  commrt::ib::Pd* pd = nullptr;
  commrt::ib::Memories memories;
  std::vector<commrt::ib::Mr*> regions;

  ~cr_ib();
};
