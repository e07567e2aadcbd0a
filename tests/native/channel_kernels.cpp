// User kernels' channels between ranks that are threads: channel_kernels RANKS SEED STEPS. Every block of a rank is a thread
// of its own, as the host runs them, and all memory is mapped once.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "../../algorithms/device/kernel.h"

using namespace commrt;

namespace {

enum : u64 { NBYTES = 64 << 10, HALF = 16 << 10, LAP = 6, BLOCKS = 2, SHARE = NBYTES / BLOCKS };

i32 give_way(void*, u32, u64*, u64) {
  std::this_thread::yield();
  return 0;
}

struct alignas(LINE) Word { u64 value = 0; };

struct RankMemory {
  std::vector<char> array = std::vector<char>(NBYTES);
  std::vector<u64> packets;   // a region for each peer and block, at the receiver
  std::vector<Word> signals;  // likewise
  u64 abort = 0;
  Watch watch{};
  std::vector<MemoryChannel> mapped;
  Channels channels{};
};

u64 mix(u64 a, u64 b, u64 c) { return (a * 2654435761u ^ b * 40503u ^ c * 97u) * 0x9e3779b97f4a7c15ull >> 40; }
char byte_of(u64 rank, u64 round, u64 i) { return (char)mix(rank, round, i); }

void connect(std::vector<RankMemory>& world) {
  u64 ranks = world.size();
  for (u64 r = 0; r < ranks; r++) {
    RankMemory& own = world[r];
    own.packets.resize(ranks * BLOCKS * 2 * HALF / 8);
    own.signals.resize(ranks * BLOCKS);
    own.watch = {&own.abort, ~0ull, 0, nullptr, give_way};
  }
  for (u64 r = 0; r < ranks; r++) {
    RankMemory& own = world[r];
    own.mapped.resize(ranks * BLOCKS);
    own.channels = {r, ranks, BLOCKS, own.array.data(), NBYTES, own.mapped.data(), nullptr};
    for (u64 peer = 0; peer < ranks; peer++)
      for (u64 block = 0; block < BLOCKS; block++) {
        u64 mine = r * BLOCKS + block, theirs = peer * BLOCKS + block;
        MemoryChannel& c = own.mapped[theirs];
        c.watch = &own.watch, c.peer = peer, c.local = own.array.data(), c.nbytes = NBYTES;
        c.remote = (u64)world[peer].array.data();
        c.semaphore = {(u64)&world[peer].signals[mine].value, &own.signals[theirs].value, 0, 0};
        c.packets_out = (char*)world[peer].packets.data() + mine * 2 * HALF;
        c.packets_in = (char*)own.packets.data() + theirs * 2 * HALF;
        c.packet_half = HALF, c.lap = LAP, c.packets_sent = c.packets_received = 0;
      }
  }
}

void check(bool right, const char* what, u64 rank, u64 round) {
  if (right) return;
  fprintf(stderr, "WRONG %s, rank %llu, round %llu\n", what, rank, round);
  _exit(1);
}

// A block has its share of the array: first what it sends, then what it receives. Each rank sends to the next one.
struct Share {
  char* array;
  u64 out, in;
  void fill(u64 rank, u64 round, u64 n) const {
    for (u64 i = 0; i < n; i++) array[out + i] = byte_of(rank, round, i);
  }
  bool holds(u64 rank, u64 round, u64 n) const {
    for (u64 i = 0; i < n; i++)
      if (array[in + i] != byte_of(rank, round, i)) return false;
    return true;
  }
};

template <class Packet> bool by_packets(MemoryChannel& next, MemoryChannel& last, const Share& s, u64 n) {
  return next.put_packets<Packet>(s.out, n) && last.get_packets<Packet>(s.in, n);
}

void run_block(Channels& channels, u64 seed, u64 rounds) {
  u64 rank = channels.rank, ranks = channels.ranks, before = (rank + ranks - 1) % ranks;
  MemoryChannel& next = channels.memory((u32)((rank + 1) % ranks), block_id());
  MemoryChannel& last = channels.memory((u32)before, block_id());
  u64 base = block_id() * SHARE, half = SHARE / 2;
  Share s{channels.array, base, base + half};
  for (u64 round = 0; round < rounds; round++) {
    u64 kind = mix(seed, round, 0) % 4, n = mix(seed, round, 1) % (kind >= 2 ? HALF / 2 : half);
    if (mix(seed, round, rank + 2) % 8 == 0) usleep((unsigned)mix(rank, round, 3) % 1000);
    s.fill(rank, round, n);
    bool done;
    if (kind == 0) done = next.put(s.in, s.out, n) && next.signal() && last.wait();
    else if (kind == 1) done = next.signal() && last.wait() && last.get(s.in, s.out, n);
    else if (kind == 2) done = by_packets<LL16>(next, last, s, n);
    else done = by_packets<LL8>(next, last, s, n);
    check(done && s.holds(before, round, n), "data", rank, round);
    done = last.signal() && next.wait();  // what was sent has been taken: the next round may overwrite it
    check(done, "the answer", rank, round);
  }
}

}  // namespace

int main(int, char** argv) {
  u64 ranks = strtoull(argv[1], nullptr, 10), seed = strtoull(argv[2], nullptr, 10), rounds = strtoull(argv[3], nullptr, 10);
  std::vector<RankMemory> world(ranks);
  connect(world);
  std::vector<std::thread> threads;
  for (RankMemory& rank : world)
    for (u32 block = 0; block < BLOCKS; block++)
      threads.emplace_back([&rank, block, seed, rounds] {
        commrt_enter_block(block, BLOCKS);
        run_block(rank.channels, seed, rounds);
      });
  for (std::thread& thread : threads) thread.join();
  printf("channels: %llu ranks, seed %llu: all right\n", ranks, seed);
  return 0;
}
