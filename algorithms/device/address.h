// From names to addresses: chunks of user buffers, slots of scratch and packets, here and at peers.
#pragma once
#include "launch.h"

namespace commrt {

CR_DEV u64 least(u64 a, u64 b) { return a < b ? a : b; }

CR_DEV u64 chunk_first(const Launch& L, u32 part) { return least(part * L.part, L.width); }
CR_DEV u64 chunk_bytes(const Launch& L, u32 part) { return least(L.part, L.width - chunk_first(L, part)) << L.shift; }
CR_DEV u64 chunk_offset(const Launch& L, u32 index, u32 part) {
  return (index * L.count + L.first + chunk_first(L, part)) << L.shift;
}

// Bytes of this operation, and where in its chunk it starts.
struct Extent { u64 shift, nbytes; };
CR_DEV Extent extent(const Launch& L, const Block& b, const Op& op) {
  u64 all = chunk_bytes(L, op.size_part);
  if (!(op.flags & SLICED)) return {0, all};
  u64 shift = least(b.turn * L.program->unit, all);
  return {shift, least(L.program->unit, all - shift)};
}

CR_DEV u64 slot_offset(const Launch& L, const Ref& ref, u64 shift) {
  u64 parity = seeded(Seeded::ONE_HALF) ? 0 : L.epoch & 1;
  if (ref.buffer == PACKETS) return parity * L.lane->packets_half + ref.index * L.packet_slot;
  return parity * L.lane->scratch_half + ref.index * L.scratch_slot + shift;
}

CR_DEV char* user_address(const Launch& L, const Ref& ref) {
  if (ref.rank == SELF) return ref.buffer == INPUT ? L.input : L.output;
  const Peer& peer = L.lane->peers[ref.rank];
  return (char*)(ref.buffer == INPUT ? peer.input : peer.output);
}

CR_DEV char* slot_base(const Launch& L, const Ref& ref) {
  const Lane& lane = *L.lane;
  if (ref.rank == SELF) return ref.buffer == SCRATCH ? lane.scratch : ref.buffer == HOST ? lane.host : lane.packets;
  return ref.buffer == SCRATCH ? lane.peers[ref.rank].scratch : lane.peers[ref.rank].packets;
}

CR_DEV char* address(const Launch& L, const Ref& ref, u64 shift) {
  if (ref.buffer <= OUTPUT) return user_address(L, ref) + chunk_offset(L, ref.index, ref.part) + shift;
  return slot_base(L, ref) + slot_offset(L, ref, shift);
}

// The addresses of an operation: looked up once on a CPU, recomputed on a GPU, where a local array would go to memory.
struct Addresses {
#if CR_GPU
  const Launch& L;
  u32 first;
  u64 shift;
  CR_DEV Addresses(const Launch& launch, u32 ref, u32, u64 by) : L(launch), first(ref), shift(by) {}
  CR_DEV char* operator[](u32 k) const { return address(L, L.program->refs[first + k], shift); }
#else
  char* at[MAX_REFS];
  Addresses(const Launch& L, u32 ref, u32 n, u64 shift) {
    for (u32 k = 0; k < n; k++) at[k] = address(L, L.program->refs[ref + k], shift);
  }
  char* operator[](u32 k) const { return at[k]; }
#endif
};

}  // namespace commrt
