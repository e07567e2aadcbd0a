// Plans as kernels: one launch, one grid, one thread block for each block of the plan. All of its blocks are resident at
// once: whoever launches sees to that. Plans are lowered for it (commrt/lowering.py): where a thread touches what others
// of its block have under way, a SYNC lies between.
//
// Nothing that a launch is made of changes, so a captured launch replays right: epochs are read here, from the lane.
#pragma once
#include "device_math.h"
#include "executor.h"

namespace commrt {

enum Going : u32 { STOP, GO, LAST };

// By one thread, before any of the block is in the window.
CR_DEV void open(Launch& L, u64 first, u32 block, u32& going) {
  open_window(L, first);
  enter(L);
  going = first || !load_relaxed(L.lane->abort) ? GO : STOP;
  if (block || going == STOP) return;
  if (!first) begin(L);
  show_entered(L);
}

// By one thread, once its block has finished the window. The last block ends it for the rank; the others wait, if another follows.
CR_DEV u32 close(Block& b, const Launch& L, bool more) {
  Lane& lane = *L.lane;
  u32 nblocks = L.program->nblocks;
  if (nblocks == 1 || add_acq_rel(&lane.arrived, 1) + 1 == (b.barriers + 1) * nblocks) return LAST;
  if (!more) return STOP;
  while (load_acquire(&lane.epoch) < L.epoch)
    if (!patience(b, L)) return STOP;
  return GO;
}

CR_DEV void complete(const Launch& L) {
  const Lane& lane = *L.lane;
  if (tid() || load_relaxed(&lane.failure)) return;
  store_release(&lane.control->completed, lane.control->sequence);
  if (L.done) store_release(L.done, 1);
}

template <class Math> CR_DEV bool run_window(Block& b, const Launch& L) {
  if (!vote(b, guard(b, L))) return false;
  b.at = 0;
  return run<Math>(b, L);
}

// `block`: which one of the plan's.
template <class Math> CR_DEV void run_plan(const Launch* launch, u32 block) {
  CR_SHARED Launch L;  // this block's: blocks may be in different windows
  CR_SHARED u32 going;
  for (u32 i = tid(); i < sizeof(Launch) / 8; i += nthreads()) ((u64*)&L)[i] = ((const u64*)launch)[i];
  open_votes();
  Block b;
  b.budget = 0;
  u64 next = 0;
  do {
    sync_block();
    if (tid() == 0) open(L, next, block, going);
    sync_block();
    if (going == STOP) return;
    open_block(b, L, block);
    if (!run_window<Math>(b, L)) return;
    next = L.first + L.width;
    if (tid() == 0) going = close(b, L, next < L.count);
    sync_block();
    if (going == LAST) leave(L);
    if (going == LAST && next >= L.count) complete(L);
  } while (going != STOP && next < L.count);
}

// Types and operators by the names that users know them by. An average is a sum that the launch divides.
namespace named {
typedef i8 int8;
typedef u8 uint8;
typedef i16 int16;
typedef u16 uint16;
typedef i32 int32;
typedef u32 uint32;
typedef i64 int64;
typedef u64 uint64;
typedef Float16 float16;
typedef BFloat16 bfloat16;
typedef float float32;
typedef double float64;
typedef Sum sum;
typedef Prod prod;
typedef Min min;
typedef Max max;
typedef Sum avg;
}  // namespace named

}  // namespace commrt

// Defines the kernel run_plan_<dtype>_<op>. Plans that only move data run in any of them.
#define CR_RUN_PLAN(DTYPE, OP)                                                                          \
  CR_KERNEL run_plan_##DTYPE##_##OP(const commrt::Launch* launch) {                                     \
    commrt::run_plan<commrt::DeviceMath<commrt::named::DTYPE, commrt::named::OP>>(launch, commrt::block_id()); \
  }
