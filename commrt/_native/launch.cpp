// The life of one launch: begin, announce, guard, run window by window, flush, end; and what can go wrong with it.
#include <stddef.h>

#include "comm.h"
#include "reduce.h"

namespace commrt {
namespace {

enum { RETRIES = 64 };  // polls in place of a cursor that is alone, before it gives way

void open_blocks(cr_launch& w) {
  w.live = w.launch.program->nblocks;
  for (u32 k = 0; k < w.live; k++) {
    open_block(w.blocks[k], w.launch, k);
    w.done[k] = false;
  }
}

void enter_window(cr_launch& w, u64 first) {
  open_window(w.launch, first);
  enter(w.launch);
  show_entered(w.launch);
  open_blocks(w);
  w.announced = 0;
  bool tell = w.lane->has_ports && !w.launch.program->synchronising;
  w.phase = tell ? cr_launch::ANNOUNCING : cr_launch::GUARDED;
}

void start(cr_launch& w) {
  w.sequence = w.lane->sequence = begin(w.launch);
  enter_window(w, 0);
}

// Peers behind a port can't see which window was entered; after a one-way plan they need to know.
bool announce(cr_launch& w) {
  Lane& lane = w.lane->lane;
  for (; w.announced < lane.ranks; w.announced++) {
    const Peer& peer = lane.peers[w.announced];
    if (w.announced == lane.rank || !peer.port) continue;
    int taken = peer.port->signal(peer.port->context, peer.mirror_at + offsetof(Control, entered), w.launch.epoch);
    if (taken <= 0) return false;
  }
  w.phase = cr_launch::GUARDED;
  return true;
}

bool flushed(cr_launch& w) {
  if (w.lane->has_ports)
    for (const Peer& peer : w.lane->peers)
      if (peer.port && peer.port->flush(peer.port->context) <= 0) return false;
  return true;
}

bool run_block(cr_launch& w, u32 k, u32 budget) {
  Block& b = w.blocks[k];
  u32 pc = b.pc;
  u64 turn = b.turn, at = b.at;
  b.budget = budget;
  if (run<HostMath>(b, w.launch)) {
    w.done[k] = true;
    w.live--;
    return true;
  }
  return b.pc != pc || b.turn != turn || b.at != at;
}

bool run_blocks(cr_launch& w, bool alone) {
  u32 budget = alone && w.live == 1 ? RETRIES : 0;
  bool moved = false;
  for (u32 k = 0; k < w.launch.program->nblocks; k++)
    if (!w.done[k]) moved |= run_block(w, k, budget);
  if (!w.live) w.phase = cr_launch::FLUSHING;
  return moved;
}

bool end_window(cr_launch& w, bool& finished) {
  if (!flushed(w)) return false;
  leave(w.launch);
  u64 next = w.launch.first + w.launch.width;
  if (next < w.launch.count) return enter_window(w, next), true;
  store_release(&w.lane->lane.control->completed, w.sequence);
  return finished = true;
}

}  // namespace

bool advance(cr_launch& w, bool alone, bool& finished) {
  bool moved = false;
  for (;;) {
    switch (w.phase) {
      case cr_launch::WAITING: start(w); break;
      case cr_launch::ANNOUNCING:
        if (!announce(w)) return moved;
        break;
      case cr_launch::GUARDED:
        if (!guard(w.blocks[0], w.launch)) return moved;
        w.blocks[0].at = 0;
        w.phase = cr_launch::RUNNING;
        break;
      case cr_launch::RUNNING: {
        bool some = run_blocks(w, alone);
        moved |= some;
        if (w.phase == cr_launch::RUNNING) return moved;
        break;
      }
      case cr_launch::FLUSHING:
        if (!end_window(w, finished)) return moved;
        if (finished) return true;
        break;
    }
    moved = true;
  }
}

void explain(const cr_launch& w, cr_failure& f) {
  const Launch& L = w.launch;
  f.sequence = w.sequence;
  f.nbytes = L.count << L.shift;
  f.mine[0] = L.tag, f.mine[1] = L.what, f.mine[2] = L.count, f.mine[3] = L.root;
  f.block = f.operation = f.op_code = f.waits_for = UNKNOWN;
  if (w.phase == cr_launch::GUARDED) {
    u64 at = w.blocks[0].at;
    if (at < w.lane->members.size()) f.waits_for = w.lane->members[at];
  }
  for (u32 k = 0; w.phase == cr_launch::RUNNING && k < L.program->nblocks; k++) {
    if (w.done[k]) continue;
    const Block& b = w.blocks[k];
    const Op& op = L.program->ops[b.pc];
    f.block = k;
    f.operation = b.pc - L.program->begin[k];
    f.op_code = op.code;
    f.channel = op.channel;
    if ((op.code == WAIT || op.code == SIGNAL) && b.at < op.npeers)
      f.waits_for = w.lane->members[L.program->peers[op.peer + b.at]];
    return;
  }
}

void describe(const cr_launch& w, u32 peer, cr_failure& f) {
  const Control& c = *w.lane->lane.peers[peer].view;
  f.peer = w.lane->members[peer];
  f.peer_sequence = load_acquire(&c.sequence);
  f.theirs[0] = load_relaxed(&c.tag), f.theirs[1] = load_relaxed(&c.what);
  f.theirs[2] = load_relaxed(&c.count), f.theirs[3] = load_relaxed(&c.root);
}

namespace {

bool differs(const cr_launch& w, u32 peer) {
  const Control& c = *w.lane->lane.peers[peer].view;
  if (load_acquire(&c.sequence) != w.sequence) return false;
  u64 tag = load_relaxed(&c.tag);
  // A peer that is just beginning its next operation has written only some of it.
  return tag != w.launch.tag && load_relaxed(&c.check) == check_of(tag, w.sequence);
}

// Dead, closed or broken before its part of this operation was done.
int lost(const cr_launch& w, u32 peer, cr_failure& f) {
  const cr_comm& comm = *w.lane->comm;
  u32 rank = w.lane->members[peer];
  if (rank == comm.config.rank) return CR_OK;
  const Control& state = *comm.view(rank);
  u64 code = load_acquire(&state.state);
  if (code == CR_OK && !comm.dead[rank]) return CR_OK;
  if (load_acquire(&w.lane->lane.peers[peer].view->completed) >= w.sequence) return CR_OK;
  describe(w, peer, f);
  if (code < CR_MISMATCH || comm.dead[rank]) return CR_PEER_LOST;
  u64 culprit = load_relaxed(&state.culprit);
  if (code != CR_MISMATCH && culprit < comm.config.shape.ranks && culprit != comm.config.rank) f.peer = (u32)culprit;
  return code == CR_CLOSED ? CR_PEER_LOST : (int)code;
}

}  // namespace

int check(cr_launch& w, i64 now, cr_failure& f) {
  cr_comm& comm = *w.lane->comm;
  explain(w, f);
  f.peer = f.waits_for;
  if (load_acquire(&comm.abort)) return f.peer = UNKNOWN, CR_ABORTED;
  if (w.phase == cr_launch::WAITING) return CR_OK;
  for (u32 peer = 0; peer < w.lane->lane.ranks; peer++)
    if (peer != w.lane->lane.rank && differs(w, peer)) return describe(w, peer, f), CR_MISMATCH;
  int gone = 0;
  for (u32 peer = 0; peer < w.lane->lane.ranks && !gone; peer++) gone = lost(w, peer, f);
  // What it had sent may not have been looked at yet: it is lost when a second look finds nothing new.
  if (gone && w.lost_once) return gone;
  w.lost_once = gone != CR_OK;
  if (!w.deadline_ns) w.deadline_ns = w.timeout_ns < 0 ? INT64_MAX : now + w.timeout_ns;
  return now > w.deadline_ns ? (int)CR_TIMEOUT : 0;
}

// A packet does not say who wrote it: the first peer whose operation differs is to blame.
void blame(const cr_launch& w, cr_failure& f) {
  for (u32 peer = 0; peer < w.lane->lane.ranks; peer++)
    if (peer != w.lane->lane.rank && differs(w, peer)) return describe(w, peer, f);
}

u32 log2_itemsize(u32 dtype) {
  static const u8 shifts[] = {0, 0, 0, 1, 1, 2, 2, 3, 3, 1, 1, 2, 3, 0, 0, 0, 0, 3, 4};
  return dtype < sizeof shifts ? shifts[dtype] : ~0u;
}

}  // namespace commrt
