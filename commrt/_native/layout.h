// Where everything lies in a rank's segment. A function of the communicator's shape alone, so all ranks agree.
#pragma once
#include "../../algorithms/device/launch.h"
#include "api.h"

namespace commrt {

enum LaneKind { COLLECTIVE, SEND, RECV };

// What a sleeping rank and those who wake it share. `sleepers` counts in rank 0's segment only.
struct alignas(LINE) Doorbell {
  u64 asleep;
  u32 bell;
  u32 pad;
  u64 alarm;  // set by a peer whose communicator is broken
  alignas(LINE) u64 sleepers;
};

class Layout {
 public:
  explicit Layout(const cr_shape& shape) : s_(shape) {
    u64 at = 0;
    doorbell = take(at, sizeof(Doorbell), 1);
    controls_ = take(at, sizeof(Control), 1 + 2ull * s_.ranks);
    mirrors_ = take(at, sizeof(Control), 3ull * s_.ranks);
    verdict = take(at, sizeof(Verdict), 1);
    verdicts_ = take(at, sizeof(Verdict), s_.ranks);
    lines_ = take(at, LINE_SET, 3ull * s_.ranks);
    at = (at + PAGE - 1) / PAGE * PAGE;
    packets = take(at, s_.packets_half, 2);
    scratch = take(at, s_.scratch_half, 2);
    pair_packets_ = take(at, s_.pair_packets_half, 2ull * s_.ranks);
    pair_scratch_ = take(at, s_.pair_scratch_half, 2ull * s_.ranks);
    total = (at + PAGE - 1) / PAGE * PAGE;
  }
  u64 control(LaneKind kind, u32 peer) const { return controls_ + slot(kind, peer) * sizeof(Control); }
  // What `from` shows about its lane of that kind, for those who can't look into its memory.
  u64 mirror(LaneKind kind, u32 from) const { return mirrors_ + (kind * s_.ranks + from) * sizeof(Control); }
  u64 verdict_of(u32 from) const { return verdicts_ + from * sizeof(Verdict); }
  // Lines that `from` writes to signal on the owner's lane of that kind.
  u64 lines(LaneKind kind, u32 from) const { return lines_ + (kind * s_.ranks + from) * LINE_SET; }
  u64 pair_packets(u32 from) const { return pair_packets_ + 2 * from * s_.pair_packets_half; }
  u64 pair_scratch(u32 from) const { return pair_scratch_ + 2 * from * s_.pair_scratch_half; }

  u64 doorbell, verdict, packets, scratch, total;

 private:
  enum : u64 { PAGE = 4096, LINE_SET = sizeof(Line) * MAX_CHANNELS * 2 };
  u64 slot(LaneKind kind, u32 peer) const { return kind == COLLECTIVE ? 0 : 1 + (kind - SEND) * s_.ranks + peer; }
  static u64 take(u64& at, u64 each, u64 n) { u64 here = at; at += each * n; return here; }

  cr_shape s_;
  u64 controls_, mirrors_, verdicts_, lines_, pair_packets_, pair_scratch_;
};

}  // namespace commrt
