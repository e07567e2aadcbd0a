// One kernel for each thing that is looked for in the machine code, and one that uses every operation of a channel.
#include "kernel.h"
using namespace commrt;

CR_KERNEL release_word(u64* to, u64 value) { store_release(to, value); }
CR_KERNEL relaxed_word(u64* to, u64 value) { store_relaxed(to, value); }
CR_KERNEL acquire_word(u64* to, const u64* from) { store_relaxed(to, load_acquire(from)); }
CR_KERNEL arrive(u64* counter, u64* to) { store_relaxed(to, add_acq_rel(counter, 1)); }
CR_KERNEL packet_out(u64* to, u64 value) { put_ll16(to, value, 1); }

// A product and a sum that must round twice.
CR_KERNEL two_roundings(float* x) { x[3] = fold<Sum>(fold<Prod>(x[0], x[1]), x[2]); }

CR_KERNEL channel_operations(Channels* channels, u64 n) {
  u32 rank = (u32)channels->rank, peer = (rank + 1) % (u32)channels->ranks;
  MemoryChannel& c = channels->memory(peer, block_id());
  if (!c.put(0, 0, n) || !c.signal() || !c.wait() || !c.get(0, n, n)) return;
  if (!c.put_packets(0, n) || !c.get_packets(0, n)) return;
  if (!c.put_packets<LL8>(0, n) || !c.get_packets<LL8>(0, n)) return;
  if (c.poll() && !c.reduce<Float16, Sum>(0, 0, n / 2)) return;
  c.write<u32>(nblocks(), c.read<u32>(tid()));
}
