// The plan interpreter: one source for CPU, CUDA and HIP. A step that can't go on leaves its cursor where it stands and
// returns false; on a GPU that means an abort, on a CPU that the next block has its turn.
#pragma once
#include "movement.h"

namespace commrt {

CR_DEV bool do_barrier(Block& b, const Launch& L) {
  u32 nblocks = L.program->nblocks;
  if (nblocks == 1 || seeded(Seeded::NO_BARRIER)) return true;
  if (!b.at) {
    if (tid() == 0) add_acq_rel(&L.lane->arrived, 1);
    b.at = 1;
    b.barriers++;
  }
  while (load_acquire(&L.lane->arrived) < b.barriers * nblocks)
    if (!patience(b, L)) return false;
  return true;
}

CR_DEV void do_loop(Block& b, const Launch& L, const Op& op) {
  u64 unit = L.program->unit, turns = (chunk_bytes(L, op.size_part) + unit - 1) / unit;
  if (++b.turn < turns) b.pc = L.program->begin[b.id] + op.target - 1;  // run() adds one
  else b.turn = 0;
}

template <class Math> CR_DEV bool step(Block& b, const Launch& L, const Op& op) {
  switch (op.code) {
#if CR_GPU
    case COPY: case PUT: case GET: return do_copy(b, L, op);  // all memory is mapped; one body, not three
#else
    case COPY: return do_copy(b, L, op);
    case PUT: return do_put(b, L, op);
    case GET: return do_get(b, L, op);
#endif
    case REDUCE: return Math::reduce(b, L, op);
    case SIGNAL: return do_signal(b, L, op);
    case WAIT: return do_wait(b, L, op);
    case PUT_PACKETS: return do_put_packets(b, L, op);
    case UNPACK_PACKETS: return do_unpack_packets(b, L, op);
    case REDUCE_PACKETS: return Math::reduce_packets(b, L, op);
    case SWITCH_REDUCE: return Math::switch_reduce(L, op);
    case SWITCH_BROADCAST: return Math::switch_broadcast(L, op);
    case BARRIER: return do_barrier(b, L);
    case SYNC: return true;
    default: return do_loop(b, L, op), true;
  }
}

CR_DEV void open_block(Block& b, const Launch& L, u32 id) {
  b.id = id;
  b.pc = L.program->begin[id];
  b.end = L.program->begin[id + 1];
  b.turn = b.at = b.barriers = 0;
  b.half = b.failure = b.votes = 0;
}

#if CR_SPIN
// Where the threads of a block meet: so that a signal says what all have done, and all may use what a wait has brought.
CR_DEV bool meet_before(u8 code) {
  return (code == SIGNAL && !seeded(Seeded::UNSYNCED_SIGNAL)) || code == REDUCE || (code >= SWITCH_REDUCE && code <= SYNC);
}
CR_DEV bool meet_after(u8 code) { return (code == WAIT && !seeded(Seeded::UNSYNCED_WAIT)) || code == BARRIER; }

// Whether all threads of the block can go on: they stop together, so that none works on without what another had to do.
#if CR_CUDA
CR_DEV void open_votes() {}
CR_DEV bool vote(Block&, bool going) { return __syncthreads_and(going); }
#else
// Two words in turn, since one thread may be at the next vote while others still read the last one's. Who stops, stays.
CR_DEV u32* stops() {
  CR_SHARED u32 words[2];
  return words;
}
CR_DEV void open_votes() {
  if (tid() == 0) stops()[0] = stops()[1] = 0;
}
CR_DEV bool vote(Block& b, bool going) {
  u32* stop = stops() + (b.votes++ & 1);
  if (!going) *stop = 1;
  sync_block();
  return !*stop;
}
#endif

// By a thread that can't go on: other blocks see the abort.
CR_DEV bool give_up(const Block& b, const Launch& L) {
  if (!b.failure) return false;
  store_relaxed(&L.lane->failure, (u64)b.culprit << 32 | b.failure);
  store_release(L.lane->abort, 1);
  return false;
}

// True: the block has finished this window. A thread that can't go on takes the others' way, but does nothing on it.
template <class Math> CR_DEV bool run(Block& b, const Launch& L) {
  bool going = true;
  for (; b.pc < b.end; b.pc++, b.at = 0) {
    const Op& op = L.program->ops[b.pc];
    if (meet_before(op.code) && !vote(b, going)) return false;
    if (op.code == LOOP) do_loop(b, L, op);
    else if (going) going = step<Math>(b, L, op) || give_up(b, L);
    if (meet_after(op.code) && !vote(b, going)) return false;
  }
  return vote(b, going);
}
#else
// True: the block has finished this window.
template <class Math> CR_DEV bool run(Block& b, const Launch& L) {
  for (; b.pc < b.end; b.pc++, b.at = 0)
    if (!step<Math>(b, L, L.program->ops[b.pc])) return false;
  return true;
}
#endif

// Cuts the next window. Chunks start at multiples of 64 bytes of it, so that no two ranks write one line.
CR_DEV void open_window(Launch& L, u64 first) {
  L.first = first;
  L.width = least(L.window, L.count - first);
  u64 parts = L.program->parts, grain = 64 >> L.shift;
  L.part = parts == 1 ? L.width : ((L.width + parts - 1) / parts + grain - 1) / grain * grain;
  u64 nbytes = L.part << L.shift;
  L.scratch_slot = (nbytes + LINE - 1) / LINE * LINE;
  L.packet_slot = ((nbytes + 7) / 8 * PACKET + PACKET + LINE - 1) / LINE * LINE;
}

// A peer may still read, or not have read, what lies in the half that this window reuses, unless it has entered the
// window before. Synchronising plans know; after others it is read from the peers' control blocks.
CR_DEV bool guard(Block& b, const Launch& L) {
  const Lane& lane = *L.lane;
  if (lane.synced + 1 >= L.epoch || seeded(Seeded::EARLY_REUSE)) return true;
  return each(b, L, lane.ranks, [&](u64 rank) {
    return rank == lane.rank || load_acquire(&lane.peers[rank].view->entered) + 1 >= L.epoch;
  });
}

// What peers compare when they wait in vain. The sequence comes last: it says that the rest is whole.
CR_DEV u64 begin(const Launch& L) {
  Control& c = *L.lane->control;
  u64 sequence = c.sequence + 1, at = sequence % HISTORY;
  store_relaxed(&c.tags[at], L.tag);
  store_relaxed(&c.what[at], L.what);
  store_relaxed(&c.count[at], L.count);
  store_relaxed(&c.root[at], L.root);
  store_release(&c.sequence, sequence);
  return sequence;
}

CR_DEV void enter(Launch& L) {
  const Lane& lane = *L.lane;
  L.epoch = lane.epoch + 1;
  L.flag = lane.flag == lane.lap ? 1 : lane.flag + 1;
}
CR_DEV void show_entered(const Launch& L) { store_release(&L.lane->control->entered, L.epoch); }

// In the last two windows of a lap the flags that smaller messages skipped are wiped: nobody writes to this half before
// the next window is entered.
CR_DEV void wipe(const Lane& lane, u64 epoch) {
  u64* half = (u64*)(lane.packets + (epoch & 1) * lane.packets_half);
  for (u64 i = tid(); i < lane.packets_half / 8; i += nthreads()) store_relaxed(half + i, 0);
  sync_block();
}

// By all threads of one block, once every block has finished the window.
CR_DEV void leave(const Launch& L) {
  Lane& lane = *L.lane;
  if (L.flag + 2 > lane.lap && lane.packets) wipe(lane, L.epoch);  // a sender of a pair has none
  if (tid()) return;
  if (L.program->synchronising) lane.synced = L.epoch;
  lane.arrived = 0;
  lane.flag = L.flag;
  store_release(&lane.epoch, L.epoch);
}

}  // namespace commrt
