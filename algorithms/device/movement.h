// Copies, puts, gets and plain packet movement.
#pragma once
#include "packets.h"
#include "signals.h"

namespace commrt {

enum { GET_STEP = 1 << 20 };  // bytes of one request of a get, so that a long one gives way

CR_DEV void move(char* to, const char* from, u64 nbytes) {
  if (to == from) return;
#if CR_GPU
  u64 body = (((u64)to | (u64)from) & 15) ? 0 : nbytes / 16 * 16;
  for (u64 i = tid() * 16ull; i < body; i += nthreads() * 16ull) plain_store(to + i, plain_load<Pair64>(from + i));
  for (u64 i = body + tid(); i < nbytes; i += nthreads()) plain_store(to + i, plain_load<u8>(from + i));
#else
  if (nbytes) __builtin_memcpy(to, from, nbytes);
#endif
}

#if !CR_GPU && defined(__x86_64__) && !CR_SANITIZED
inline void stream(char* to, const char* from, u64 nbytes) {
  typedef i64 Pair __attribute__((vector_size(16)));
  typedef i64 Loose __attribute__((vector_size(16), may_alias, aligned(1)));
  u64 i = -(u64)to & 15;
  __builtin_memcpy(to, from, i);
  for (; i + 16 <= nbytes; i += 16) {
#if defined(__clang__)
    __builtin_nontemporal_store(*(const Loose*)(from + i), (Pair*)(to + i));
#else
    __builtin_ia32_movntdq((Pair*)(to + i), *(const Loose*)(from + i));
#endif
  }
  __builtin_memcpy(to + i, from + i, nbytes - i);
  __builtin_ia32_sfence();  // such stores are ordered by this alone: the signal that follows is not enough
}

// To where a peer will read. A plain store must first take the line back from the cache of the peer that read it last.
// That was measured to cost 7 ns a line at some times and 28 at others on one machine; in the latter, stores past the
// caches are several times as fast. So one copy of many is plain, and timed.
enum { STREAM_LEAST = 2048, TIMED_LEAST = 8192, TIMED_EVERY = 64, SLOW_LINE = 40 };  // bytes, bytes, copies, cycles
inline void publish(Lane& lane, char* to, const char* from, u64 nbytes) {
  if (nbytes < STREAM_LEAST) return move(to, from, nbytes);
  if (nbytes < TIMED_LEAST || ++lane.copies % TIMED_EVERY != 1)
    return lane.far == FAR ? stream(to, from, nbytes) : move(to, from, nbytes);
  u64 start = __builtin_ia32_rdtsc();
  move(to, from, nbytes);
  bool slow = __builtin_ia32_rdtsc() - start > nbytes / 64 * SLOW_LINE;
  lane.far = !slow ? NEAR : lane.far == NEAR ? DOUBTFUL : FAR;  // a lost time slice looks slow too: ask once more
  if (lane.far == DOUBTFUL) lane.copies = 0;
}
#else
CR_DEV void publish(Lane&, char* to, const char* from, u64 nbytes) { move(to, from, nbytes); }
#endif

CR_DEV bool do_copy(Block& b, const Launch& L, const Op& op) {
  Extent e = extent(L, b, op);
  const Ref* refs = L.program->refs + op.ref;
  if (!e.nbytes) return true;
  char *to = address(L, refs[0], e.shift), *from = address(L, refs[1], e.shift);
  if (op.flags & SHARED) publish(*L.lane, to, from, e.nbytes);
  else move(to, from, e.nbytes);
  return true;
}

CR_DEV bool do_put(Block& b, const Launch& L, const Op& op) {
#if !CR_GPU
  const Ref* refs = L.program->refs + op.ref;
  Peer& peer = L.lane->peers[refs[0].rank];
  if (peer.port && refs[0].buffer == SCRATCH) {
    Extent e = extent(L, b, op);
    if (!e.nbytes) return true;
    u64 at = peer.scratch_at + slot_offset(L, refs[0], e.shift);
    return port_answer(b, refs[0].rank, peer.port->put(peer.port->context, at, address(L, refs[1], e.shift), e.nbytes));
  }
#endif
  return do_copy(b, L, op);
}

CR_DEV bool do_get(Block& b, const Launch& L, const Op& op) {
#if !CR_GPU
  if (!L.windows) {
    const Ref* refs = L.program->refs + op.ref;
    const Port* direct = L.lane->peers[refs[1].rank].direct;
    Extent e = extent(L, b, op);
    char* to = address(L, refs[0], e.shift);
    u64 from = (u64)address(L, refs[1], e.shift);
    u64 steps = (e.nbytes + GET_STEP - 1) / GET_STEP;
    return each(b, L, steps, [&](u64 i) {
      u64 at = i * GET_STEP;
      return port_answer(b, refs[1].rank, direct->get(direct->context, to + at, from + at, least(GET_STEP, e.nbytes - at)));
    });
  }
#endif
  return do_copy(b, L, op);
}

// Packet 0 of a slot carries the writer's fingerprint, in the line that small payloads lie in: checked at no cost.
// It does not say who wrote it: a mismatch names the culprit from the control blocks.
CR_DEV bool do_put_packets(Block& b, const Launch& L, const Op& op) {
  u64 nbytes = chunk_bytes(L, op.size_part), words = (nbytes + 7) / 8;
  const char* from = nbytes ? address(L, L.program->refs[op.ref + op.ndst], 0) : nullptr;
  Addresses to(L, op.ref, op.ndst, 0);
  u32 flag = L.flag;
  return each(b, L, words + 1, [&](u64 i) {
    u64 word = i ? load_word(from + 8 * (i - 1), nbytes - 8 * (i - 1)) : L.tag;
    for (u32 k = 0; k < op.ndst; k++) put_ll16((u64*)(to[k] + PACKET * i), word, flag);
    return true;
  });
}

CR_DEV bool do_unpack_packets(Block& b, const Launch& L, const Op& op) {
  u64 nbytes = chunk_bytes(L, op.size_part), words = (nbytes + 7) / 8;
  const Ref& source = L.program->refs[op.ref + 1];
  char* from = address(L, source, 0);
  char* to = nbytes ? address(L, L.program->refs[op.ref], 0) : nullptr;
  return each(b, L, words + 1, [&](u64 i) {
    u64 word;
    if (!get_ll16((const u64*)(from + PACKET * i), L.flag, word)) return false;
    if (i) return store_word(to + 8 * (i - 1), word, nbytes - 8 * (i - 1)), true;
    return word == L.tag || fail(b, MISMATCH, UNKNOWN);
  });
}

}  // namespace commrt
