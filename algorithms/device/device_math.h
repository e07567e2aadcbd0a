// Reductions in a kernel that is compiled for one (dtype, operator). Where the executor's `Math` is HostMath on a CPU.
#pragma once
#include "movement.h"
#include "reduce.h"
#include "switch.h"

namespace commrt {

template <class T, class Op> struct DeviceMath {
  static CR_DEV bool reduce(Block& b, const Launch& L, const commrt::Op& op) {
    Extent e = extent(L, b, op);
    if (!e.nbytes) return true;
    char** at = look_up(op.ndst + op.nsrc, [&](u32 k) { return address(L, L.program->refs[op.ref + k], e.shift); });
    commrt::reduce<T, Op>(at, op.ndst, at + op.ndst, op.nsrc, e.nbytes / sizeof(T), divisor(L, op));
    return true;
  }

  // By a switch where one is; else what it would do, through mapped memory: the same chunk on every rank, in rank order.
  static CR_DEV bool switch_reduce(const Launch& L, const commrt::Op& op) {
    u64 nbytes = chunk_bytes(L, op.size_part);
    if (!nbytes) return true;
    const Ref* refs = L.program->refs + op.ref;
    if (CR_SWITCH && multicast(L, refs[1]) && switch_folds<T, Op>(divisor(L, op))) {
      commrt::switch_reduce<T, Op>(address(L, refs[0], 0), multicast(L, refs[1]), nbytes, divisor(L, op));
      return true;
    }
    char** at = look_up(L.lane->ranks + 1, [&](u32 k) { return k ? on_rank(L, refs[1], k - 1) : address(L, refs[0], 0); });
    commrt::reduce<T, Op>(at, 1, at + 1, L.lane->ranks, nbytes / sizeof(T), divisor(L, op));
    return true;
  }
  static CR_DEV bool switch_broadcast(const Launch& L, const commrt::Op& op) {
    u64 nbytes = chunk_bytes(L, op.size_part);
    if (!nbytes) return true;
    const Ref* refs = L.program->refs + op.ref;
    const char* from = address(L, refs[1], 0);
    if (CR_SWITCH && refs[1].buffer == SCRATCH && multicast(L, refs[0]))
      return commrt::switch_broadcast(multicast(L, refs[0]), from, nbytes), true;
    for (u32 rank = 0; rank < L.lane->ranks; rank++) move(on_rank(L, refs[0], rank), from, nbytes);
    return true;
  }

  // Element e of the operation is word e - 1; element 0 checks and sends the headers.
  static CR_DEV bool reduce_packets(Block& b, const Launch& L, const commrt::Op& op) {
    const Words words = {L, op, L.program->refs + op.ref, chunk_bytes(L, op.size_part), divisor(L, op)};
    return each(b, L, (words.nbytes + 7) / 8 + 1, [&](u64 i) { return i ? words.fold(i) : words.headers(b); });
  }

 private:
  // A slot of scratch on all ranks at once, or null.
  static CR_DEV char* multicast(const Launch& L, const Ref& ref) {
    char* all = L.lane->multicast;
    return all && ref.buffer == SCRATCH ? all + slot_offset(L, ref, 0) : nullptr;
  }

  static CR_DEV u32 divisor(const Launch& L, const commrt::Op& op) { return op.flags & FINAL ? L.divisor : 0; }

  // Addresses that the block's threads look up together, once an operation: in a loop over data, computing them costs
  // more than the arithmetic, and an array of a thread's own would lie in slow memory.
  template <class At> static CR_DEV char** look_up(u32 n, At address_of) {
    char** at = table();  // nobody uses the last operation's: threads meet before this one
    for (u32 k = tid(); k < n; k += nthreads()) at[k] = address_of(k);
    sync_block();
    return at;
  }
  static CR_DEV char** table() {
    CR_SHARED char* at[2 * MAX_REFS];
    return at;
  }
  static CR_DEV char* on_rank(const Launch& L, const Ref& ref, u32 rank) {
    return address(L, {ref.buffer, rank == L.lane->rank ? (i32)SELF : (i32)rank, ref.index, ref.part}, 0);
  }

  // A word goes through one thread: all its sources are there before anything is written.
  struct Words {
    const Launch& L;
    const commrt::Op& op;
    const Ref* refs;
    u64 nbytes;
    u32 divisor;

    CR_DEV bool fold(u64 i) const {
      WordFold<T, Op> acc;
      u64 word;
      if (!source(0, i, word)) return false;
      acc.first(word);
      for (u32 k = 1; k < op.nsrc; k++) {
        if (!source(k, i, word)) return false;
        acc.next(word);
      }
      word = acc.result(divisor);
      for (u32 k = 0; k < op.ndst; k++) {
        char* to = address(L, refs[k], 0);
        if (refs[k].buffer == PACKETS) put_ll16((u64*)(to + PACKET * i), word, L.flag);
        else store_word(to + 8 * (i - 1), word, nbytes - 8 * (i - 1));
      }
      return true;
    }
    CR_DEV bool source(u32 k, u64 i, u64& word) const {
      const Ref& ref = refs[op.ndst + k];
      const char* from = address(L, ref, 0);
      if (ref.buffer == PACKETS) return get_ll16((const u64*)(from + PACKET * i), L.flag, word);
      word = load_word(from + 8 * (i - 1), nbytes - 8 * (i - 1));
      return true;
    }
    CR_DEV bool headers(Block& b) const {
      for (u32 k = 0; k < op.nsrc; k++) {
        const Ref& ref = refs[op.ndst + k];
        u64 tag;
        if (ref.buffer != PACKETS) continue;
        if (!get_ll16((const u64*)address(L, ref, 0), L.flag, tag)) return false;
        if (tag != L.tag) return fail(b, MISMATCH, UNKNOWN);
      }
      for (u32 k = 0; k < op.ndst; k++)
        if (refs[k].buffer == PACKETS) put_ll16((u64*)address(L, refs[k], 0), L.tag, L.flag);
      return true;
    }
  };
};

}  // namespace commrt
