// What a user's kernel includes. The same source is compiled for the CPU (C++17), by NVRTC and by clang for AMD.
//
//   #include "kernel.h"
//   CR_KERNEL shift(commrt::Channels* channels, u64 nbytes) { ... }
//
// On a CPU a block is one OS thread of its own, and nthreads() is 1. Loops over data start at tid() and step nthreads().
#pragma once
#include "channel.h"

namespace commrt {

#if CR_CUDA
CR_DEV u32 nblocks() { return gridDim.x; }
#elif CR_HIP
// Of the dispatch packet: work items of the grid, by those of a block.
CR_DEV u32 nblocks() { return *(const __attribute__((address_space(4))) u32*)((const __attribute__((address_space(4))) char*)__builtin_amdgcn_dispatch_ptr() + 12) / nthreads(); }
#else
struct Place { u32 block, blocks; };
inline Place& place() {
  static thread_local Place here{0, 1};
  return here;
}
inline u32 block_id() { return place().block; }
inline u32 nblocks() { return place().blocks; }
#endif

}  // namespace commrt

#if !CR_GPU
// Called by the host on a block's thread, before the kernel.
extern "C" inline __attribute__((used, visibility("default"))) void commrt_enter_block(u32 block, u32 blocks) {
  commrt::place() = {block, blocks};
}
#endif
