#include "comm.h"

#include <stddef.h>

#include <utility>

#include "engine.h"

using namespace commrt;

namespace {

constexpr i64 PUBLISH_NS = 300000000, SCAN_NS = 20000000;

}  // namespace

cr_comm::cr_comm(cr_engine* e, const cr_config& c, cr_group* g)
    : engine(e), group(g), config(c), layout(c.shape), abort(0), state(CR_OK), aborting(0), failure{}, segments(c.shape.ranks),
      ports(c.shape.ranks), directs(c.shape.ranks), life(c.shape.ranks, -1), dead(c.shape.ranks),
      window_base(c.shape.ranks), window_size(c.shape.ranks), windows(c.shape.ranks), pairs(2 * c.shape.ranks),
      scanned_ns(0), beats(c.shape.ranks), beat_ns(c.shape.ranks), has_ports(false) {
  segments[c.rank] = c.segment;
  init_lane(collectives, COLLECTIVE, c.rank);
  if (g) g->members[c.rank] = this;
}

void cr_comm::init_lane(cr_lane& l, LaneKind kind, u32 peer) {
  const cr_shape& shape = config.shape;
  l.comm = this;
  l.kind = kind;
  l.peer = peer;
  l.sequence = l.matched = 0;
  l.head = l.tail = nullptr;
  l.has_ports = false;
  u32 ranks = kind == COLLECTIVE ? shape.ranks : 2;
  l.members.resize(ranks);
  for (u32 r = 0; r < ranks; r++) l.members[r] = r;
  if (kind == SEND) l.members = {config.rank, peer};
  if (kind == RECV) l.members = {peer, config.rank};
  l.peers.assign(ranks, Peer{});
  for (u32 member : l.members) l.windows.push_back(windows[member]);
  l.routes = std::vector<std::atomic<const Routes*>>(COLLECTIVES * 2ull * ranks);
  Lane& lane = l.lane;
  lane = Lane{};
  lane.epoch = lane.synced = config.epoch;
  lane.lap = config.lap;
  lane.flag = (u32)(config.epoch % config.lap);
  lane.rank = kind == COLLECTIVE ? config.rank : kind == RECV;
  lane.ranks = ranks;
  lane.control = control(kind, peer);
  lane.peers = l.peers.data();
  lane.abort = &abort;
  if (kind == COLLECTIVE) {
    lane.scratch = lane.host = config.segment + layout.scratch, lane.packets = config.segment + layout.packets;
    lane.scratch_half = shape.scratch_half, lane.packets_half = shape.packets_half;
  } else {
    // The mailbox of an ordered pair lies at its receiver; the sender's view of it has the same size.
    if (kind == RECV) lane.scratch = config.segment + layout.pair_scratch(peer), lane.packets = config.segment + layout.pair_packets(peer);
    lane.scratch_half = shape.pair_scratch_half, lane.packets_half = shape.pair_packets_half;
  }
  store_release(&lane.control->entered, config.epoch);
  for (u32 r = 0; r < ranks; r++) connect_lane(l, r);
}

// What this lane needs to know of its r-th member, once that one's segment or port is known.
void cr_comm::connect_lane(cr_lane& l, u32 r) {
  u32 rank = l.members[r], me = config.rank;
  LaneKind theirs = l.kind == SEND ? RECV : l.kind == RECV ? SEND : COLLECTIVE;
  Peer& p = l.peers[r];
  char* segment = segments[rank];
  p.in = (Line*)(config.segment + layout.lines(l.kind, rank));
  p.out_at = layout.lines(theirs, me);
  p.mirror_at = layout.mirror(theirs, me);
  bool mailbox = l.kind == SEND;
  p.scratch_at = mailbox ? layout.pair_scratch(me) : layout.scratch;
  p.port = segment || !ports[rank].put ? nullptr : &ports[rank];
  p.direct = directs[rank].get ? &directs[rank] : nullptr;
  p.view = (Control*)(config.segment + layout.mirror(l.kind, rank));
  l.has_ports |= p.port != nullptr;
  if (!segment) return;
  p.out = (Line*)(segment + p.out_at);
  p.view = (Control*)(segment + layout.control(theirs, me));
  p.scratch = segment + p.scratch_at;
  p.packets = segment + (mailbox ? layout.pair_packets(me) : layout.packets);
}

cr_lane* cr_comm::pair(u32 peer, bool send) {
  std::lock_guard<std::mutex> one(pairs_lock);
  auto& slot = pairs[peer * 2 + send];
  if (!slot) {
    auto lane = std::make_unique<cr_lane>();
    init_lane(*lane, send ? SEND : RECV, peer);
    std::lock_guard<SpinLock> hold(engine->gate());
    slot = std::move(lane);
  }
  return slot.get();
}

void cr_comm::show_windows(u32 rank, Windows shown) {
  auto show = [=](cr_lane& lane) {
    for (u32 r = 0; r < lane.members.size(); r++)
      if (lane.members[r] == rank) lane.windows[r] = shown;
  };
  std::lock_guard<std::mutex> hold(pairs_lock);
  windows[rank] = shown;
  show(collectives);
  for (auto& lane : pairs)
    if (lane) show(*lane);
}

bool cr_comm::poll_ports() {
  bool moved = false;
  for (u32 rank = 0; rank < ports.size(); rank++) {
    if (!ports[rank].poll || dead[rank]) continue;
    int answer = ports[rank].poll(ports[rank].context);
    if (answer < 0) dead[rank] = 1;
    moved |= answer > 0;
  }
  return moved;
}

// A mirror is whole when its sequence comes, behind the rest. `entered` has its own way, with the windows.
int commrt::show_calls(const Port& port, const Control& c, u64 mirror_at) {
  u64 from = offsetof(Control, tags);
  return port.put(port.context, mirror_at + from, (const char*)&c + from, sizeof(Control) - from);
}
int commrt::show_sequence(const Port& port, const Control& c, u64 mirror_at) {
  return port.signal(port.context, mirror_at + offsetof(Control, sequence), c.sequence);
}

// Shows our control blocks and verdict to those who can't look for themselves. True: all took it.
bool cr_comm::push_controls() {
  bool all = true;
  for (u32 rank = 0; rank < ports.size(); rank++) {
    const Port& port = ports[rank];
    if (!port.put || segments[rank] || dead[rank]) continue;
    const LaneKind kinds[] = {COLLECTIVE, SEND, RECV}, theirs[] = {COLLECTIVE, RECV, SEND};
    for (u32 k = 0; k < 3; k++) {
      const Control& c = *control(kinds[k], rank);
      if (k && !c.sequence) continue;
      u64 at = layout.mirror(theirs[k], config.rank);
      all &= show_calls(port, c, at) > 0 && show_sequence(port, c, at) > 0 &&
             port.signal(port.context, at + offsetof(Control, completed), c.completed) > 0;
    }
    const Control& own = *control(COLLECTIVE, rank);
    if (own.state == CR_OK) continue;
    all &= port.put(port.context, layout.verdict_of(config.rank), config.segment + layout.verdict, sizeof(Verdict)) > 0 &&
           port.signal(port.context, layout.mirror(COLLECTIVE, config.rank) + offsetof(Control, state), own.state) > 0 &&
           (!broken(own.state) || port.signal(port.context, layout.doorbell + offsetof(Doorbell, alarm), 1) > 0);
  }
  return all;
}

const Verdict* cr_comm::verdict(u32 rank) const {
  if (segments[rank]) return (const Verdict*)(segments[rank] + layout.verdict);
  return (const Verdict*)(config.segment + layout.verdict_of(rank));
}

// The state comes last: it says that the verdict is whole.
void cr_comm::publish(const cr_failure& f) {
  Verdict& v = *(Verdict*)(config.segment + layout.verdict);
  store_relaxed(&v.sequence, f.sequence);
  store_relaxed(&v.finder, f.finder);
  store_relaxed(&v.culprit, f.peer);
  for (u32 k = 0; k < 4; k++) store_relaxed(&v.mine[k], f.mine[k]), store_relaxed(&v.theirs[k], f.theirs[k]);
  store_release(&control(COLLECTIVE, config.rank)->state, f.code);
  for (u32 rank = 0; broken(f.code) && rank < config.shape.ranks; rank++)
    if (rank != config.rank && doorbell(rank)) store_release(&doorbell(rank)->alarm, 1);
  // Nobody may drive this communicator any more: what the ports took must leave now.
  bool told = false;
  for (i64 until = now_ns() + PUBLISH_NS; has_ports && now_ns() < until && !(told && flush_ports()); poll_ports())
    told = told || push_controls();
}

bool cr_comm::flush_ports() {
  bool all = true;
  for (u32 rank = 0; rank < ports.size(); rank++)
    if (ports[rank].put && !segments[rank] && !dead[rank]) all &= ports[rank].flush(ports[rank].context) != 0;
  return all;
}

void cr_comm::adopt(u32 rank, cr_failure& f) const {
  const Verdict& v = *verdict(rank);
  f.code = (u32)load_acquire(&view(rank)->state);
  f.sequence = load_relaxed(&v.sequence);
  f.finder = (u32)load_relaxed(&v.finder);
  f.peer = (u32)load_relaxed(&v.culprit);
  if (f.finder >= config.shape.ranks) f.finder = rank;
  if (f.peer >= config.shape.ranks) f.peer = UNKNOWN;
  for (u32 k = 0; k < 4; k++) f.mine[k] = load_relaxed(&v.mine[k]), f.theirs[k] = load_relaxed(&v.theirs[k]);
  f.nbytes = nbytes_of(f.mine);
  if (f.code != CR_MISMATCH || f.peer != config.rank) return;
  std::swap(f.mine, f.theirs);  // each side tells its own first
  std::swap(f.finder, f.peer);
}

bool cr_comm::complaint(cr_failure& f) const {
  for (u32 rank = 0; rank < config.shape.ranks; rank++) {
    if (rank == config.rank || !view(rank) || load_acquire(&view(rank)->state) != CR_MISMATCH) continue;
    f = cr_failure{};
    f.block = f.operation = f.op_code = f.waits_for = UNKNOWN;
    return adopt(rank, f), true;
  }
  return false;
}

// Who lives, and who has shown something since: a rank that waits, but is stopped, shows nothing.
void cr_comm::scan(i64 now) {
  if (now - scanned_ns <= SCAN_NS) return;
  scanned_ns = now;
  Control& own = *collectives.lane.control;
  store_relaxed(&own.beat, own.beat + 1);
  for (u32 rank = 0; rank < config.shape.ranks; rank++) {
    if (life[rank] >= 0 && !dead[rank]) dead[rank] = !cr_memory_owner_lives(life[rank]);
    u64 beat = view(rank) ? load_relaxed(&view(rank)->beat) : 0;
    if (beat != beats[rank]) beats[rank] = beat, beat_ns[rank] = now;
  }
  if (has_ports) push_controls();
}

// A sender that has returned learns here what its peers make of it; one that left before its part is no peer to wait for.
bool cr_comm::agreed(cr_failure& f, cr_lane*& where, bool& pending) {
  f = cr_failure{};
  f.block = f.operation = f.op_code = f.waits_for = UNKNOWN;
  f.finder = config.rank;
  pending = false;
  std::vector<cr_lane*> lanes{&collectives};
  {
    std::lock_guard<SpinLock> hold(engine->gate());
    for (auto& lane : pairs)
      if (lane && lane->kind == SEND) lanes.push_back(lane.get());
  }
  for (cr_lane* lane : lanes)
    for (u32 peer = 0; !match(*lane, lane->sequence) && peer < lane->members.size(); peer++) {
      u32 rank = lane->members[peer];
      where = lane;
      if (rank == config.rank) continue;
      for (u64 q = lane->matched + 1; q <= lane->sequence; q++)
        if (differs(*lane, peer, q)) return f.code = CR_MISMATCH, dispute(*lane, peer, q, f), false;
      if (load_acquire(&lane->lane.peers[peer].view->sequence) >= lane->sequence) continue;
      bool left = dead[rank] || load_acquire(&view(rank)->state) != CR_OK;
      if (!left) pending = true;
      else if (lane->kind == COLLECTIVE) return f.code = CR_PEER_LOST, dispute(*lane, peer, lane->sequence, f), false;
    }
  return true;
}

void cr_lane::keep(std::unique_ptr<cr_program> program) {
  std::lock_guard<SpinLock> hold(comm->engine->gate());
  programs.push_back(std::move(program));
}
void cr_lane::keep(u64 row, std::unique_ptr<Routes> kept) {
  std::lock_guard<SpinLock> hold(comm->engine->gate());
  routes[row].store(kept.get(), std::memory_order_release);
  rows.push_back(std::move(kept));
}
