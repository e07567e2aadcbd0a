// Channels: how a user's kernel talks to a peer. MSCCL++'s names and meanings; offsets and sizes are bytes, in 64 bits.
//
// All threads of a block call an operation together, and a channel is used by one block at a time. An operation that
// answers false has failed, and so will all that follow it: the kernel should return, and the host raises the error.
// A channel joins the array of this rank with the peer's: `to` and `from` are offsets in them. See docs/kernels.md.
#pragma once
#include "movement.h"
#include "reduce.h"

namespace commrt {

enum Ended : u32 { PEER_LOST = 11, TIMED_OUT = 12, WAS_ABORTED = 13, LINK_FAILED = 15, OUT_OF_BOUNDS = 16 };

// What ends a wait, shared by the channels of one `comm.channels`. Nothing waits without a deadline.
struct Watch {
  const u64* abort;    // the communicator's poison word
  u64 timeout_ns;      // of one wait
  u64 failed;          // of the first failure: code | peer << 32
  void* communicator;  // for the host alone, as is
  // one step of a wait: gives way, keeps links going, looks at clock and peers. 0: go on; else what ended it
  i32 (*tend)(void* communicator, u32 peer, u64* began_ns, u64 timeout_ns);
};

CR_DEV bool fail(Watch& watch, u32 code, u32 peer) {
  if (!load_relaxed(&watch.failed)) store_relaxed(&watch.failed, code | (u64)peer << 32);
  return false;
}

#if CR_CUDA
CR_DEV u64 clock_ns() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
#elif CR_HIP
CR_DEV u64 clock_ns() { return __builtin_readsteadycounter() * 10; }  // 100 MHz on every supported chip
#elif CR_SPIN
u64 clock_ns();  // of whoever runs kernels on CPU threads as a GPU would
#endif

CR_DEV u32 tend(Watch& watch, u32 peer, u64& began) {
  if (u64 failed = load_relaxed(&watch.failed)) return (u32)failed;
#if CR_SPIN
  (void)peer;
  if (load_relaxed(watch.abort)) return WAS_ABORTED;
  u64 now = clock_ns();
  if (!began) began = now;
  return now - began > watch.timeout_ns ? TIMED_OUT : 0;
#else
  return (u32)watch.tend(watch.communicator, peer, &began, watch.timeout_ns);
#endif
}

// Until ready(), or the watch ends it. What is ready when it ends counts: a peer may leave behind its last signal.
template <class Ready> CR_DEV bool until(Watch& watch, u32 peer, Ready ready) {
  enum { SPINS = CR_GPU ? 1024 : 64 };
  u64 began = 0;
  for (u32 spins = 1; !ready(); spins++) {
    relax();
    if (spins % SPINS) continue;
    if (u32 code = tend(watch, peer, began)) return ready() || fail(watch, code, peer);
  }
  return true;
}

// Signals of a channel, one word each way; values are counts, so that a replay is harmless.
struct Semaphore {
  u64 out;             // the word in the peer's memory: an address, or the port's offset
  const u64* in;       // the peer's signals
  u64 sent, received;
};

struct Channel {
  Watch* watch;
  u64 peer;
  char* local;         // this rank's array
  u64 remote;          // the peer's: an address, or the port's offset
  u64 nbytes;          // of either
  Semaphore semaphore;

  // The peer's next signal; all that came before it is visible to the whole block.
  CR_DEV bool wait() {
    if (tid() == 0) {
      u64 next = semaphore.received + 1;
      if (until(*watch, (u32)peer, [&] { return load_acquire(semaphore.in) >= next; })) semaphore.received = next;
    }
    sync_block();
    return !load_relaxed(&watch->failed);
  }

  // Whether a wait would return at once, as this thread sees it.
  CR_DEV bool poll() const { return load_acquire(semaphore.in) > semaphore.received; }

  CR_DEV bool inside(u64 to, u64 from, u64 n) {
    bool fits = to <= nbytes && n <= nbytes - to && from <= nbytes && n <= nbytes - from;
    return fits || fail(*watch, OUT_OF_BOUNDS, (u32)peer);
  }
};

// 8 bytes of data in 16: what to use where 16-byte accesses are as fast as 8-byte ones.
struct LL16 {
  enum { NBYTES = PACKET, DATA = PACKET_DATA };
  static CR_DEV void put(char* at, u64 word, u32 flag) { put_ll16((u64*)at, word, flag); }
  static CR_DEV bool get(const char* at, u32 flag, u64& word) { return get_ll16((const u64*)at, flag, word); }
};

// 4 bytes of data in 8.
struct LL8 {
  enum { NBYTES = 8, DATA = 4 };
  static CR_DEV void put(char* at, u64 word, u32 flag) { put_ll8((u64*)at, (u32)word, flag); }
  static CR_DEV bool get(const char* at, u32 flag, u64& word) {
    u32 low;
    bool there = get_ll8((const u64*)at, flag, low);
    return word = low, there;
  }
};

// Over a link on which the peer's memory can be loaded and stored.
struct MemoryChannel : Channel {
  char *packets_out, *packets_in;   // both halves, at the peer and here
  u64 packet_half;                  // bytes
  u64 lap;                          // flags run 1..lap; even
  u64 packets_sent, packets_received;

  // peer[to...] = own[from...].
  CR_DEV bool put(u64 to, u64 from, u64 n) {
    if (!inside(to, from, n)) return false;
    return move((char*)remote + to, local + from, n), true;
  }

  // own[to...] = peer[from...]. The peer must have signalled that it is there.
  CR_DEV bool get(u64 to, u64 from, u64 n) {
    if (!inside(to, from, n)) return false;
    return move(local + to, (const char*)remote + from, n), true;
  }

  // Element `index` of the peer's array; by one thread.
  template <class T> CR_DEV T read(u64 index) const { return plain_load<T>((const char*)remote + index * sizeof(T)); }
  template <class T> CR_DEV void write(u64 index, T value) { plain_store<T>((char*)remote + index * sizeof(T), value); }

  // own[to...] = own[to...] Op peer[from...], `count` elements of T.
  template <class T, class Op> CR_DEV bool reduce(u64 to, u64 from, u64 count) {
    if (count > nbytes / sizeof(T)) return fail(*watch, OUT_OF_BOUNDS, (u32)peer);
    if (!inside(to, from, count * sizeof(T))) return false;
    char* dsts[] = {local + to};
    const char* srcs[] = {local + to, (const char*)remote + from};
    return commrt::reduce<T, Op>(dsts, 1, srcs, 2, count, 0), true;
  }

  // Everything that the block did before is visible to the peer once its wait has returned.
  CR_DEV bool signal() {
    sync_block();
    if (tid() == 0) store_release((u64*)semaphore.out, ++semaphore.sent);
    return true;
  }

  // Sends own[from...], data and flag in one store, so that no signal is needed: the peer's get_packets of as many
  // bytes takes it. Halves alternate: before the third call the peer must be known to have taken the first, as where
  // each rank sends and gets in turn.
  template <class Packet = LL16> CR_DEV bool put_packets(u64 from, u64 n) {
    if (!inside(0, from, n) || !packets_hold<Packet>(n)) return false;
    sync_block();
    u64 call = packets_sent;
    char* half = packets_out + (call & 1) * packet_half;
    for (u64 i = tid(); i * Packet::DATA < n; i += nthreads())
      Packet::put(half + i * Packet::NBYTES, load<Packet>(local + from, i, n), flag(call));
    sync_block();
    if (tid() == 0) packets_sent = call + 1;
    return true;
  }

  // own[to...] = what the peer's put_packets sent.
  template <class Packet = LL16> CR_DEV bool get_packets(u64 to, u64 n) {
    if (!inside(to, 0, n) || !packets_hold<Packet>(n)) return false;
    sync_block();
    u64 call = packets_received, word;
    char* half = packets_in + (call & 1) * packet_half;
    bool whole = true;
    for (u64 i = tid(); whole && i * Packet::DATA < n; i += nthreads()) {
      whole = until(*watch, (u32)peer, [&] { return Packet::get(half + i * Packet::NBYTES, flag(call), word); });
      if (whole) store<Packet>(local + to, i, n, word);
    }
    sync_block();
    if (flag(call) + 2 > lap) wipe(half);
    if (tid() == 0) packets_received = call + 1;
    return !load_relaxed(&watch->failed);
  }

 private:
  CR_DEV u32 flag(u64 call) const { return (u32)(1 + call % lap); }

  template <class Packet> CR_DEV bool packets_hold(u64 n) {
    bool fits = n <= packet_half / Packet::NBYTES * Packet::DATA;
    return fits || fail(*watch, OUT_OF_BOUNDS, (u32)peer);
  }

  template <class Packet> static CR_DEV u64 load(const char* from, u64 i, u64 n) {
    u64 at = i * Packet::DATA;
    return load_word(from + at, least(Packet::DATA, n - at));
  }
  template <class Packet> static CR_DEV void store(char* to, u64 i, u64 n, u64 word) {
    u64 at = i * Packet::DATA;
    store_word(to + at, word, least(Packet::DATA, n - at));
  }

  // At the end of a lap, what shorter messages left of older flags goes, before flags repeat.
  CR_DEV void wipe(char* half) {
    for (u64 i = tid(); i < packet_half / 8; i += nthreads()) store_relaxed((u64*)half + i, 0);
    sync_block();
  }
};

#if !CR_GPU
// Over any link: requests that the link carries out later, in order. For the host's own processors.
struct PortChannel : Channel {
  const Port* port;

  // peer[to...] = own[from...], which must not be written before a flush.
  bool put(u64 to, u64 from, u64 n) {
    if (!inside(to, from, n)) return false;
    return request([&] { return port->put(port->context, remote + to, local + from, n); });
  }

  // Seen by the peer after every put before it.
  bool signal() {
    u64 next = semaphore.sent + 1;
    bool taken = request([&] { return port->signal(port->context, semaphore.out, next); });
    semaphore.sent += taken;
    return taken;
  }

  bool put_with_signal(u64 to, u64 from, u64 n) { return put(to, from, n) && signal(); }
  bool put_with_signal_and_flush(u64 to, u64 from, u64 n) { return put_with_signal(to, from, n) && flush(); }

  // The sources of all puts may be reused; not: the peer has them.
  bool flush() {
    return request([&] { return port->flush(port->context); });
  }

 private:
  template <class Attempt> bool request(Attempt attempt) {
    int answer = 0;
    bool over = until(*watch, (u32)peer, [&] { return (answer = attempt()) != 0; });
    return over && (answer > 0 || fail(*watch, LINK_FAILED, (u32)peer));
  }
};
#endif

// What a kernel gets for a `comm.channels(array, blocks)`: to each peer one channel a block and kind.
struct Channels {
  u64 rank, ranks, blocks;
  char* array;             // this rank's
  u64 nbytes;
  MemoryChannel* mapped;   // [ranks * blocks], null where some link maps no memory
  void* ports;             // as many PortChannels

  CR_DEV MemoryChannel& memory(u32 peer, u32 block) const { return mapped[peer * blocks + block]; }
#if !CR_GPU
  PortChannel& port(u32 peer, u32 block) const { return ((PortChannel*)ports)[peer * blocks + block]; }
#endif
};

static_assert(sizeof(Watch) == 40 && sizeof(Channel) == 72 && sizeof(MemoryChannel) == 120 && sizeof(Channels) == 56,
              "commrt/channels.py lays them out too");

}  // namespace commrt
