// The life of one launch: begin, announce, guard, run window by window, flush, end; and what can go wrong with it.
#include <stddef.h>

#include "comm.h"
#include "reduce.h"

namespace commrt {
namespace {

enum { RETRIES = 64 };  // polls in place of a cursor that is alone, before it gives way
// A process that was killed closes its links before its lock is dropped, and another may be dying with it.
constexpr i64 DYING_NS = 60000000, LINK_NS = 300000000, SILENT_NS = 1000000000;

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
  w.phase = w.lane->has_ports ? cr_launch::ANNOUNCING : cr_launch::GUARDED;
}

void start(cr_launch& w) {
  w.sequence = w.lane->sequence = begin(w.launch);
  enter_window(w, 0);
}

// Peers behind a port can't see what is called here, nor which window is entered: those that this rank writes to must
// know before it does, and all of them after a one-way plan. Three steps each.
bool announce(cr_launch& w) {
  Lane& lane = w.lane->lane;
  const Program& program = *w.launch.program;
  for (; w.announced < 3 * lane.ranks; w.announced++) {
    u32 rank = w.announced / 3;
    const Peer& peer = lane.peers[rank];
    if (rank == lane.rank || !peer.port || (program.synchronising && !program.writes[rank])) continue;
    int taken = w.announced % 3 == 0   ? show_calls(*peer.port, *lane.control, peer.mirror_at)
                : w.announced % 3 == 1 ? show_sequence(*peer.port, *lane.control, peer.mirror_at)
                                       : peer.port->signal(peer.port->context, peer.mirror_at, w.launch.epoch);
    if (taken < 0) w.bad_link = rank;
    if (taken <= 0) return false;
  }
  w.phase = cr_launch::GUARDED;
  return true;
}

bool flushed(cr_launch& w) {
  for (u32 rank = 0; w.lane->has_ports && rank < w.lane->peers.size(); rank++) {
    const Port* port = w.lane->peers[rank].port;
    int done = port ? port->flush(port->context) : 1;
    if (done < 0) w.bad_link = rank;
    if (done <= 0) return false;
  }
  return true;
}

// Ranks that send one way are held here until their peers have begun what was sent: two such operations in a row are
// as far as a rank gets before it learns that they differ.
bool cleared(cr_launch& w) {
  bool known = match(*w.lane, w.sequence - 1);
  return known || w.lane->kind != COLLECTIVE;
}

// Before success is reported: nobody can have written here as part of another operation, nobody has given this one up.
// A synchronising plan has heard from all, each on its way here with a fingerprint that was compared: it need not look,
// unless a peer has raised the alarm.
bool sound(const cr_launch& w) {
  const cr_lane& l = *w.lane;
  if (w.launch.program->synchronising && !load_acquire(&l.comm->doorbell(l.comm->config.rank)->alarm)) return true;
  for (u32 peer = 0; peer < l.lane.ranks; peer++) {
    if (peer == l.lane.rank) continue;
    if (differs(l, peer, w.sequence)) return false;
    u64 state = load_acquire(&l.comm->view(l.members[peer])->state);
    if (broken(state) && load_acquire(&l.lane.peers[peer].view->completed) < w.sequence) return false;
  }
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
  if (w.live) return moved;
  bool first = w.carried && w.carriage.load(std::memory_order_relaxed) == cr_launch::APART;
  w.phase = first ? cr_launch::CARRIED : cr_launch::FLUSHING;
  if (first) w.carriage.store(cr_launch::AGREED, std::memory_order_release);
  return moved;
}

// What another library carries is between two windows of the same plan: by the first all ranks know that all have called
// it, by the second that all have it, so that none leaves the library too early.
bool carried_here(cr_launch& w) {
  if (w.carriage.load(std::memory_order_acquire) != CR_OK || !flushed(w)) return false;
  leave(w.launch);
  enter_window(w, 0);
  return true;
}

bool end_window(cr_launch& w, bool& finished) {
  if (!flushed(w)) return false;
  leave(w.launch);
  u64 next = w.launch.first + w.launch.width;
  if (next < w.launch.count) return enter_window(w, next), true;
  if (!sound(w)) return w.phase = cr_launch::DOUBTED, false;
  store_release(&w.lane->lane.control->completed, w.sequence);
  if (w.launch.program->synchronising || w.lane->kind == RECV) w.lane->matched = w.sequence;
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
        if (!cleared(w) || !guard(w.blocks[0], w.launch)) return moved;
        w.blocks[0].at = 0;
        w.phase = cr_launch::RUNNING;
        break;
      case cr_launch::RUNNING: {
        bool some = run_blocks(w, alone);
        moved |= some;
        if (w.phase == cr_launch::RUNNING) return moved;
        break;
      }
      case cr_launch::CARRIED:
        if (!carried_here(w)) return moved;
        break;
      case cr_launch::FLUSHING:
        if (!end_window(w, finished)) return moved;
        if (finished) return true;
        break;
      case cr_launch::DOUBTED: return moved;
    }
    moved = true;
  }
}

// The first member that has not begun that operation.
static u32 behind(const cr_lane& l, u64 sequence) {
  for (u32 peer = 0; peer < l.lane.ranks; peer++)
    if (peer != l.lane.rank && load_acquire(&l.lane.peers[peer].view->sequence) < sequence) return peer;
  return UNKNOWN;
}

static cr_place place(const cr_launch& w, u32 k) {
  const Launch& L = w.launch;
  const Block& b = w.blocks[k];
  const Op& op = L.program->ops[b.pc];
  cr_place p{w.lane->comm->config.rank, k, b.pc - L.program->begin[k], op.code, op.channel, UNKNOWN};
  if ((op.code == WAIT || op.code == SIGNAL) && b.at < op.npeers) p.waits_for = w.lane->members[L.program->peers[op.peer + b.at]];
  return p;
}

void places(const cr_launch& w, std::vector<cr_place>& out) {
  if (w.phase != cr_launch::RUNNING) {
    cr_failure f{};
    explain(w, f);
    out.push_back({f.finder, UNKNOWN, UNKNOWN, UNKNOWN, 0, f.waits_for});
    return;
  }
  for (u32 k = 0; k < w.launch.program->nblocks; k++)
    if (!w.done[k]) out.push_back(place(w, k));
}

void explain(const cr_launch& w, cr_failure& f) {
  const Launch& L = w.launch;
  f.sequence = w.sequence;
  f.nbytes = L.count << L.shift;
  f.mine[0] = L.tag, f.mine[1] = L.what, f.mine[2] = L.count, f.mine[3] = L.root;
  f.block = f.operation = f.op_code = f.waits_for = UNKNOWN;
  f.finder = w.lane->comm->config.rank;
  if (w.phase == cr_launch::GUARDED) {
    u64 at = w.blocks[0].at;
    if (w.lane->matched + 1 < w.sequence) at = behind(*w.lane, w.sequence - 1);
    if (at < w.lane->members.size()) f.waits_for = w.lane->members[at];
  }
  for (u32 k = 0; w.phase == cr_launch::RUNNING && k < L.program->nblocks; k++) {
    if (w.done[k]) continue;
    cr_place p = place(w, k);
    f.block = p.block, f.operation = p.operation, f.op_code = p.op_code, f.channel = p.channel, f.waits_for = p.waits_for;
    return;
  }
}

bool differs(const cr_lane& l, u32 peer, u64 sequence) {
  const Control& c = *l.lane.peers[peer].view;
  u64 theirs = load_acquire(&c.sequence);
  if (theirs < sequence || theirs + 1 >= sequence + HISTORY) return false;
  bool different = load_relaxed(&c.tags[sequence % HISTORY]) != l.lane.control->tags[sequence % HISTORY];
  return different && load_acquire(&c.sequence) + 1 < sequence + HISTORY;
}

void dispute(const cr_lane& l, u32 peer, u64 sequence, cr_failure& f) {
  const Control &mine = *l.lane.control, &theirs = *l.lane.peers[peer].view;
  u64 at = sequence % HISTORY, then = load_acquire(&theirs.sequence);
  f.peer = l.members[peer];
  f.sequence = sequence;
  f.mine[0] = mine.tags[at], f.mine[1] = mine.what[at], f.mine[2] = mine.count[at], f.mine[3] = mine.root[at];
  f.theirs[0] = then < sequence ? 0 : load_relaxed(&theirs.tags[at]);
  f.theirs[1] = load_relaxed(&theirs.what[at]), f.theirs[2] = load_relaxed(&theirs.count[at]);
  f.theirs[3] = load_relaxed(&theirs.root[at]);
  f.nbytes = nbytes_of(f.mine);
}

bool match(cr_lane& l, u64 upto) {
  for (; l.matched < upto; l.matched++)
    for (u32 peer = 0; peer < l.lane.ranks; peer++) {
      if (peer == l.lane.rank) continue;
      bool begun = load_acquire(&l.lane.peers[peer].view->sequence) > l.matched;
      if (!begun || differs(l, peer, l.matched + 1)) return false;
    }
  return true;
}

void stand(const cr_lane& l, i64 looked_ns, std::vector<cr_standing>& standing, i64 now) {
  const cr_comm& comm = *l.comm;
  standing.assign(comm.config.shape.ranks, cr_standing{});
  for (u32 peer = 0; peer < l.members.size(); peer++) {
    u32 rank = l.members[peer];
    bool own = rank == comm.config.rank;
    const Control& c = own ? *l.lane.control : *l.lane.peers[peer].view;
    i64 since = comm.beat_ns[rank] > looked_ns ? comm.beat_ns[rank] : looked_ns;
    u32 state = own ? 0 : (u32)load_acquire(&comm.view(rank)->state);
    double silent_s = own || !looked_ns ? 0 : (double)(now - since) * 1e-9;
    standing[rank] = {load_acquire(&c.sequence), load_relaxed(&c.completed), 1, state, (u32)comm.dead[rank], silent_s};
  }
}

// A packet does not say who wrote it: the first peer whose operation differs is to blame.
bool blame(const cr_launch& w, cr_failure& f) {
  for (u64 q = w.lane->matched + 1; q <= w.sequence; q++)
    for (u32 peer = 0; peer < w.lane->lane.ranks; peer++)
      if (peer != w.lane->lane.rank && differs(*w.lane, peer, q)) return dispute(*w.lane, peer, q, f), true;
  return false;
}

namespace {

// Its part of the operation has not ended well.
bool owes(const cr_launch& w, u32 peer) {
  return peer != w.lane->lane.rank && load_acquire(&w.lane->lane.peers[peer].view->completed) < w.sequence;
}

// A rank that died of itself is the cause; then those that say why they gave up; then those that just left. Who gave up
// has broken the communicator for all, also for two others that wait for each other.
int lost(const cr_launch& w, cr_failure& f) {
  const cr_comm& comm = *w.lane->comm;
  u32 left = UNKNOWN, gave_up = UNKNOWN;
  for (u32 peer = 0; peer < w.lane->lane.ranks; peer++) {
    if (!owes(w, peer)) continue;
    u32 rank = w.lane->members[peer];
    u64 state = load_acquire(&comm.view(rank)->state);
    if (state == CR_OK && comm.dead[rank]) return f.peer = rank, CR_PEER_LOST;
    if (broken(state) && gave_up == UNKNOWN) gave_up = rank;
    if (state == CR_CLOSED && left == UNKNOWN) left = rank;
  }
  for (u32 rank = 0; w.lane->kind != COLLECTIVE && gave_up == UNKNOWN && rank < comm.config.shape.ranks; rank++)
    if (rank != comm.config.rank && rank != w.lane->peer && broken(load_acquire(&comm.view(rank)->state))) gave_up = rank;
  if (gave_up == UNKNOWN) return left == UNKNOWN ? CR_OK : (f.peer = left, CR_PEER_LOST);
  cr_failure theirs = f;
  comm.adopt(gave_up, theirs);
  f.peer = theirs.peer, f.finder = theirs.finder;
  if (theirs.code == CR_MISMATCH) f = theirs;
  if (f.peer == UNKNOWN || f.peer == comm.config.rank) f.peer = theirs.finder;
  return (int)theirs.code;
}

// What a block met: a link that failed, or a signal of another operation whose caller has not shown yet what it called.
int met(const cr_launch& w, cr_failure& f) {
  u32 culprit = w.bad_link;
  int code = culprit == UNKNOWN ? CR_OK : CR_TRANSPORT;
  for (u32 k = 0; w.phase == cr_launch::RUNNING && k < w.launch.program->nblocks; k++) {
    if (!w.blocks[k].failure) continue;
    culprit = w.blocks[k].culprit;
    code = w.blocks[k].failure == MISMATCH ? CR_MISMATCH : CR_TRANSPORT;
  }
  if (code) f.peer = culprit == UNKNOWN ? UNKNOWN : w.lane->members[culprit];
  return code;
}

// Whom to name when time is up: who has not come, else who has shown nothing for long, else who is waited for.
void suspect(const cr_launch& w, i64 now, cr_failure& f) {
  std::vector<cr_standing> standing;
  stand(*w.lane, w.looked_ns, standing, now);
  double silence = (double)(w.timeout_ns / 2 < SILENT_NS ? w.timeout_ns / 2 : SILENT_NS) * 1e-9;
  for (u32 rank : w.lane->members)
    if (standing[rank].sequence < w.sequence) { f.peer = rank; return; }
  for (u32 rank : w.lane->members)
    if (standing[rank].completed < w.sequence && standing[rank].silent_s > silence) { f.peer = rank; return; }
}

}  // namespace

int check(cr_launch& w, i64 now, cr_failure& f) {
  cr_comm& comm = *w.lane->comm;
  explain(w, f);
  f.peer = f.waits_for;
  if (load_acquire(&comm.abort)) return f.peer = UNKNOWN, CR_ABORTED;
  if (w.phase == cr_launch::WAITING) return CR_OK;
  if (!w.looked_ns) w.looked_ns = now;
  if (blame(w, f)) return CR_MISMATCH;
  int gone = lost(w, f);
  bool given_up = gone != CR_OK;
  if (!gone && (w.bad_link != UNKNOWN || w.phase == cr_launch::RUNNING)) gone = met(w, f);
  // What a peer had sent may not have been looked at yet: it is lost when a later look finds nothing new.
  if (!gone) w.lost_ns = 0;
  else if (!w.lost_ns) w.lost_ns = now;
  else if (now - w.lost_ns > (gone == CR_PEER_LOST ? DYING_NS : given_up ? 0 : LINK_NS)) return gone;
  if (w.timeout_ns < 0 || now - w.looked_ns <= w.timeout_ns) return CR_OK;
  return suspect(w, now, f), CR_TIMEOUT;
}

u32 log2_itemsize(u32 dtype) {
  static const u8 shifts[] = {0, 0, 0, 1, 1, 2, 2, 3, 3, 1, 1, 2, 3, 0, 0, 0, 0, 3, 4};
  return dtype < sizeof shifts ? shifts[dtype] : ~0u;
}

u64 nbytes_of(const unsigned long long call[4]) {
  u32 shift = log2_itemsize(call[1] >> 8 & 0xff);
  return shift <= 4 ? call[2] << shift : 0;
}

}  // namespace commrt
