#include "kernel.h"

// Each block puts its share of this rank's first half into the peer's second, signals, and waits for the peer's.
CR_KERNEL exchange(char* local, char* remote, u64 nbytes, u64 signal_out, const u64* signal_in, u64 epoch, commrt::Watch* watch) {
  u64 block = commrt::block_id(), share = nbytes / commrt::nblocks();
  commrt::MemoryChannel channel{};
  channel.watch = watch;
  channel.peer = 1;
  channel.local = local;
  channel.remote = (u64)remote;
  channel.nbytes = 2 * nbytes;
  channel.semaphore = {signal_out + 128 * block, signal_in + 16 * block, epoch - 1, epoch - 1};
  if (channel.put(nbytes + share * block, share * block, share) && channel.signal()) channel.wait();
}
