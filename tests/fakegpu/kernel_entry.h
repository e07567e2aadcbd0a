// What the fake drivers need beside a kernel that is compiled for the CPU: how to call it, and the sizes of its parameters.
#pragma once
#include <chrono>
#include <cstddef>
#include <utility>

namespace commrt {
inline __attribute__((used)) u64 clock_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace commrt

namespace fakegpu {

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
