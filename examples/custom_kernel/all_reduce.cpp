// Two ways to sum floats over all ranks, written by hand. The same source is compiled for the CPU and for GPUs.
//
// The array holds this rank's `count` elements, which become the sum, and behind them as many for each rank: its slot.
// Each block works on its own part of the elements, over channels of its own, and needs no other block.
#include "kernel.h"
using namespace commrt;

struct Part { u64 first, count; };  // elements

CR_DEV Part part_of_block(u64 count) {
  u64 each = (count + nblocks() - 1) / nblocks(), first = least(block_id() * each, count);
  return {first, least(each, count - first)};
}

CR_DEV u64 in_slot(u64 rank, u64 count, u64 first) { return ((1 + rank) * count + first) * sizeof(float); }

CR_DEV u32 peer(const Channels* channels, u32 step) { return (u32)((channels->rank + step) % channels->ranks); }

// In the order of ranks, so that all get the same bits.
CR_DEV void add_up(Channels* channels, u64 count, Part part) {
  float* all = (float*)channels->array;
  for (u64 i = part.first + tid(); i < part.first + part.count; i += nthreads()) {
    float sum = channels->rank == 0 ? all[i] : all[count + i];
    for (u64 rank = 1; rank < channels->ranks; rank++) sum += rank == channels->rank ? all[i] : all[(1 + rank) * count + i];
    all[i] = sum;
  }
  sync_block();
}

// Put, signal, wait: for messages of any size.
CR_KERNEL all_reduce_puts(Channels* channels, u64 count) {
  Part part = part_of_block(count);
  for (u32 step = 1; step < channels->ranks; step++) {
    MemoryChannel& to = channels->memory(peer(channels, step), block_id());
    if (!to.put(in_slot(channels->rank, count, part.first), part.first * sizeof(float), part.count * sizeof(float))) return;
    to.signal();
  }
  for (u32 step = 1; step < channels->ranks; step++)
    if (!channels->memory(peer(channels, step), block_id()).wait()) return;
  add_up(channels, count, part);
  // Who has heard from all knows that its slots everywhere have been read: the next launch may fill them.
  for (u32 step = 1; step < channels->ranks; step++) channels->memory(peer(channels, step), block_id()).signal();
  for (u32 step = 1; step < channels->ranks; step++)
    if (!channels->memory(peer(channels, step), block_id()).wait()) return;
}

// Packets: for small ones, as data that carries its own flag needs no signal.
CR_KERNEL all_reduce_packets(Channels* channels, u64 count) {
  Part part = part_of_block(count);
  u64 nbytes = part.count * sizeof(float);
  for (u32 step = 1; step < channels->ranks; step++)
    if (!channels->memory(peer(channels, step), block_id()).put_packets(part.first * sizeof(float), nbytes)) return;
  for (u32 step = 1; step < channels->ranks; step++) {
    u32 from = peer(channels, step);
    if (!channels->memory(from, block_id()).get_packets(in_slot(from, count, part.first), nbytes)) return;
  }
  add_up(channels, count, part);
}
