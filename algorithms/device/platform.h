// What a device owes the code above it: identity, block sync, memory order by named operations, patience.
// Read by NVRTC, by clang for AMD without ROCm's headers, and by any C++17 host compiler: no header is included.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define CR_CUDA 1
#define CR_HIP 0
#define CR_DEV __device__ __forceinline__
#define CR_KERNEL extern "C" __global__ void __launch_bounds__(1024)
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#define CR_CUDA 0
#define CR_HIP 1
#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#endif
#define CR_DEV __device__ inline __attribute__((always_inline))
#define CR_KERNEL extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(1, 1024)))
#else
#define CR_CUDA 0
#define CR_HIP 0
#define CR_DEV inline __attribute__((always_inline))
#define CR_KERNEL extern "C" void
#endif
#define CR_GPU (CR_CUDA || CR_HIP)

// Sanitizers see plain stores alone.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define CR_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define CR_SANITIZED 1
#endif
#endif
#ifndef CR_SANITIZED
#define CR_SANITIZED 0
#endif
// How a wait waits: a thread of its own spins; a cursor gives way. CR_SPIN=1 makes a CPU thread wait as one of a GPU does.
#ifndef CR_SPIN
#define CR_SPIN CR_GPU
#endif
#if CR_CUDA
#define CR_SHARED __shared__
#elif CR_HIP
#define CR_SHARED __attribute__((shared))
#else
#define CR_SHARED static thread_local
#endif

namespace commrt {

// Bugs that tests must catch, under sanitizers or where PTX is interpreted, each with CR_SEEDED set to its name. Nothing
// else sets it.
enum class Seeded {
  NO_BUG, NO_RELEASE, NO_ACQUIRE, NO_BARRIER, EARLY_REUSE, ONE_HALF, UNSYNCED_SIGNAL, UNSYNCED_WAIT, ONE_FLAG,
  NO_SWITCH_FENCE
};
#ifndef CR_SEEDED
#define CR_SEEDED NO_BUG
#endif
CR_DEV constexpr bool seeded(Seeded bug) { return bug == Seeded::CR_SEEDED; }

#if CR_CUDA
CR_DEV u32 tid() { return threadIdx.x; }
CR_DEV u32 nthreads() { return blockDim.x; }
CR_DEV u32 block_id() { return blockIdx.x; }
CR_DEV void sync_block() { __syncthreads(); }
CR_DEV void store_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
CR_DEV u64 load_relaxed(const u64* p) { u64 v; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
CR_DEV void store_release(u64* p, u64 v) {
  if (seeded(Seeded::NO_RELEASE)) return store_relaxed(p, v);
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
CR_DEV u64 load_acquire(const u64* p) {
  u64 v;
  if (seeded(Seeded::NO_ACQUIRE)) return load_relaxed(p);
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
CR_DEV u64 add_acq_rel(u64* p, u64 v) { u64 old; asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory"); return old; }
CR_DEV void relax() {}
#elif CR_HIP
#define CR_SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
// address_space(1): without it clang emits slower flat accesses for pointers that were found in memory.
typedef __attribute__((address_space(1))) u64 global_u64;
CR_DEV u32 tid() { return __builtin_amdgcn_workitem_id_x(); }
CR_DEV u32 nthreads() { return __builtin_amdgcn_workgroup_size_x(); }
CR_DEV u32 block_id() { return __builtin_amdgcn_workgroup_id_x(); }
CR_DEV void sync_block() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
CR_DEV void store_release(u64* p, u64 v) { __hip_atomic_store((global_u64*)p, v, __ATOMIC_RELEASE, CR_SYSTEM); }
CR_DEV u64 load_acquire(const u64* p) { return __hip_atomic_load((const global_u64*)p, __ATOMIC_ACQUIRE, CR_SYSTEM); }
CR_DEV void store_relaxed(u64* p, u64 v) { __hip_atomic_store((global_u64*)p, v, __ATOMIC_RELAXED, CR_SYSTEM); }
CR_DEV u64 load_relaxed(const u64* p) { return __hip_atomic_load((const global_u64*)p, __ATOMIC_RELAXED, CR_SYSTEM); }
CR_DEV u64 add_acq_rel(u64* p, u64 v) { return __hip_atomic_fetch_add((global_u64*)p, v, __ATOMIC_ACQ_REL, CR_SYSTEM); }
CR_DEV void relax() { __builtin_amdgcn_s_sleep(1); }
#else
CR_DEV constexpr u32 tid() { return 0; }
CR_DEV constexpr u32 nthreads() { return 1; }
CR_DEV void sync_block() {}
CR_DEV void store_release(u64* p, u64 v) { __atomic_store_n(p, v, seeded(Seeded::NO_RELEASE) ? __ATOMIC_RELAXED : __ATOMIC_RELEASE); }
CR_DEV u64 load_acquire(const u64* p) { return __atomic_load_n(p, seeded(Seeded::NO_ACQUIRE) ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE); }
CR_DEV void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
CR_DEV u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
CR_DEV u64 add_acq_rel(u64* p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
CR_DEV void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}
#endif

// Memory that peers may hold, read and written plainly; natural alignment on a GPU, any alignment on a CPU.
struct alignas(16) Pair64 { u64 lo, hi; };
#if CR_CUDA
template <class V> CR_DEV V plain_load(const char* p) { return *(const V*)p; }
template <class V> CR_DEV void plain_store(char* p, V v) { *(V*)p = v; }
#elif CR_HIP
template <class V> CR_DEV V plain_load(const char* p) { return *(const __attribute__((address_space(1))) V*)p; }
template <class V> CR_DEV void plain_store(char* p, V v) { *(__attribute__((address_space(1))) V*)p = v; }
typedef u64 Vector64x2 __attribute__((vector_size(16)));
template <> CR_DEV Pair64 plain_load<Pair64>(const char* p) {
  Vector64x2 v = plain_load<Vector64x2>(p);
  return {v[0], v[1]};
}
template <> CR_DEV void plain_store<Pair64>(char* p, Pair64 v) { plain_store(p, Vector64x2{v.lo, v.hi}); }
#else
template <class V> CR_DEV V plain_load(const char* p) { V v; __builtin_memcpy(&v, p, sizeof(V)); return v; }
template <class V> CR_DEV void plain_store(char* p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }
#endif

// Packet words. Within a GPU stream launches are ordered by the device, so relaxed suffices there. On a CPU a packet
// may be the only proof that its writer has finished reading last launch's scratch, hence release and acquire.
#if CR_GPU
CR_DEV void store_packet(u64* p, u64 v) { store_relaxed(p, v); }
CR_DEV u64 load_packet(const u64* p) { return load_relaxed(p); }
#else
CR_DEV void store_packet(u64* p, u64 v) { store_release(p, v); }
CR_DEV u64 load_packet(const u64* p) { return load_acquire(p); }
#endif

}  // namespace commrt
