// What the fake drivers and a kernel that is compiled for the CPU need of each other: how to call it, the sizes of its
// parameters; a clock, and what multimem instructions do. Included between kernel.h and the kernel's source.
#pragma once
#include <chrono>
#include <cstddef>
#include <utility>

namespace commrt {
inline __attribute__((used)) u64 clock_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace commrt

// Where the member-th memory behind a multicast address is; set when the library is loaded.
extern "C" {
void* (*fakegpu_multicast)(const void* address, unsigned member) = nullptr;
}

#define CR_SWITCH_MEMBER fakegpu_multicast  // so the executor's kernels use such addresses

namespace fakegpu {

// multimem.ld_reduce and multimem.st, one member after another.
template <class T, class Op> T multimem_load(const T* address, Op op) {
  T value = *(const T*)fakegpu_multicast(address, 0);
  for (unsigned member = 1; void* at = fakegpu_multicast(address, member); member++) value = op(value, *(const T*)at);
  return value;
}
template <class T> void multimem_store(T* address, T value) {
  for (unsigned member = 0; void* at = fakegpu_multicast(address, member); member++) *(T*)at = value;
}

template <class... P, size_t... I> void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*(P*)arguments[I]...);
}
template <class... P> void call(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>());
}

template <class Kernel> struct Sizes;
template <class... P> struct Sizes<void (*)(P...)> {
  static constexpr unsigned of[] = {sizeof...(P), sizeof(P)...};
};

}  // namespace fakegpu

#define FAKEGPU_ENTRY(KERNEL)                                                                  \
  extern "C" void KERNEL##__call(void** arguments) { fakegpu::call(KERNEL, arguments); }       \
  extern "C" const unsigned* const KERNEL##__sizes = fakegpu::Sizes<decltype(&KERNEL)>::of;
