// Reductions on a CPU: the loops are instantiated once per (dtype, operator) elsewhere and called through L.reduce.
#pragma once
#include "movement.h"

namespace commrt {

struct HostMath {
  enum { TILE = 64 };  // words of a packet source that are gathered before they are reduced

  static u64 elements(const Launch& L, u64 nbytes) { return nbytes >> L.shift; }
  static u32 divisor(const Launch& L, const Op& op) { return op.flags & FINAL ? L.divisor : 0; }

  static bool reduce(Block& b, const Launch& L, const Op& op) {
    Extent e = extent(L, b, op);
    if (!e.nbytes) return true;
    Addresses to(L, op.ref, op.ndst, e.shift), from(L, op.ref + op.ndst, op.nsrc, e.shift);
    if (op.flags & SHARED && L.lane->far == FAR && e.nbytes >= SPREAD) return reduce_shared(L, op, to, from, e.nbytes), true;
    L.reduce(to.at, op.ndst, from.at, op.nsrc, elements(L, e.nbytes), divisor(L, op));
    return true;
  }

  // The same chunk on every rank, in rank order: what a switch would do, done through mapped memory.
  static bool switch_reduce(const Launch& L, const Op& op) {
    u64 nbytes = chunk_bytes(L, op.size_part);
    if (!nbytes) return true;
    const Ref* refs = L.program->refs + op.ref;
    char *to = address(L, refs[0], 0), *from[MAX_REFS];
    for (u32 rank = 0; rank < L.lane->ranks; rank++) from[rank] = on_rank(L, refs[1], rank);
    L.reduce(&to, 1, from, L.lane->ranks, elements(L, nbytes), divisor(L, op));
    return true;
  }
  static bool switch_broadcast(const Launch& L, const Op& op) {
    u64 nbytes = chunk_bytes(L, op.size_part);
    const Ref* refs = L.program->refs + op.ref;
    for (u32 rank = 0; nbytes && rank < L.lane->ranks; rank++) move(on_rank(L, refs[0], rank), address(L, refs[1], 0), nbytes);
    return true;
  }
  static char* on_rank(const Launch& L, Ref ref, u32 rank) {
    ref.rank = rank == L.lane->rank ? SELF : (i32)rank;
    return address(L, ref, 0);
  }

  // Element e of the operation is tile e - 1; element 0 sends and checks the headers.
  static bool reduce_packets(Block& b, const Launch& L, const Op& op) {
    u64 nbytes = chunk_bytes(L, op.size_part), words = (nbytes + 7) / 8, tiles = (words + TILE - 1) / TILE;
    Addresses to(L, op.ref, op.ndst, 0), from(L, op.ref + op.ndst, op.nsrc, 0);
    return each(b, L, tiles + 1, [&](u64 i) {
      if (!i) return headers(b, L, op, to, from);
      u64 first = (i - 1) * TILE, n = least(TILE, words - first);
      return tile(L, op, to, from, first, n, least(n * 8, nbytes - first * 8));
    });
  }

 private:
  enum { SPREAD = 4096 };  // bytes that are reduced in the own cache, then streamed to where peers read

  static void reduce_shared(const Launch& L, const Op& op, const Addresses& to, const Addresses& from, u64 nbytes) {
    alignas(64) char result[SPREAD];
    char *one = result, *sources[MAX_REFS];
    for (u64 at = 0; at < nbytes; at += SPREAD) {
      u64 n = least(SPREAD, nbytes - at);
      for (u32 k = 0; k < op.nsrc; k++) sources[k] = from[k] + at;
      L.reduce(&one, 1, sources, op.nsrc, elements(L, n), divisor(L, op));
      for (u32 k = 0; k < op.ndst; k++) {
        if (is_shared(L, op.ref + k)) publish(*L.lane, to[k] + at, result, n);
        else move(to[k] + at, result, n);
      }
    }
  }
  static bool is_shared(const Launch& L, u32 ref) {
    const Ref& r = L.program->refs[ref];
    return r.buffer == SCRATCH || r.rank != SELF;
  }

  static bool is_packet(const Launch& L, u32 ref) { return L.program->refs[ref].buffer == PACKETS; }

  static bool headers(Block& b, const Launch& L, const Op& op, const Addresses& to, const Addresses& from) {
    for (u32 k = 0; k < op.nsrc; k++) {
      u64 tag;
      if (!is_packet(L, op.ref + op.ndst + k)) continue;
      if (!get_ll16((const u64*)from[k], L.flag, tag)) return false;
      if (tag != L.tag) return fail(b, MISMATCH, UNKNOWN);
    }
    for (u32 k = 0; k < op.ndst; k++)
      if (is_packet(L, op.ref + k)) put_ll16((u64*)to[k], L.tag, L.flag);
    return true;
  }

  // Gathers packets into plain tiles, reduces these, and spreads the result; nothing is written before all are there.
  static bool tile(const Launch& L, const Op& op, const Addresses& to, const Addresses& from, u64 first, u64 n, u64 nbytes) {
    u64 in[MAX_PACKET_SOURCES][TILE], result[TILE];
    char *sources[MAX_REFS], *plain[MAX_REFS];
    u32 gathered = 0, nplain = 0;
    bool spread = false;
    for (u32 k = 0; k < op.nsrc; k++) {
      if (!is_packet(L, op.ref + op.ndst + k)) { sources[k] = from[k] + first * 8; continue; }
      if (!gather(L, from[k] + PACKET * (first + 1), in[gathered], n)) return false;
      sources[k] = (char*)in[gathered++];
    }
    for (u32 k = 0; k < op.ndst; k++) {
      if (is_packet(L, op.ref + k)) spread = true;
      else plain[nplain++] = to[k] + first * 8;
    }
    if (spread) plain[nplain++] = (char*)result;
    L.reduce(plain, nplain, sources, op.nsrc, elements(L, nbytes), divisor(L, op));
    for (u32 k = 0; spread && k < op.ndst; k++)
      if (is_packet(L, op.ref + k))
        for (u64 w = 0; w < n; w++) put_ll16((u64*)(to[k] + PACKET * (first + w + 1)), result[w], L.flag);
    return true;
  }
  static bool gather(const Launch& L, const char* from, u64* to, u64 n) {
    for (u64 w = 0; w < n; w++)
      if (!get_ll16((const u64*)(from + PACKET * w), L.flag, to[w])) return false;
    return true;
  }
};

}  // namespace commrt
