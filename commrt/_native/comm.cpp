#include "comm.h"

#include <algorithm>

#include "engine.h"

using namespace commrt;

cr_comm::cr_comm(cr_engine* e, const cr_config& c, cr_group* g)
    : engine(e), group(g), config(c), layout(c.shape), abort(0), state(CR_OK), failure{}, segments(c.shape.ranks),
      ports(c.shape.ranks), directs(c.shape.ranks), life(c.shape.ranks, -1), dead(c.shape.ranks),
      window_base(c.shape.ranks), window_size(c.shape.ranks), windows(c.shape.ranks), pairs(2 * c.shape.ranks),
      lives_ns(0), has_ports(false) {
  segments[c.rank] = c.segment;
  init_lane(collectives, COLLECTIVE, c.rank);
}

void cr_comm::init_lane(cr_lane& l, LaneKind kind, u32 peer) {
  const cr_shape& shape = config.shape;
  l.comm = this;
  l.kind = kind;
  l.peer = peer;
  l.sequence = 0;
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
    lane.scratch = config.segment + layout.scratch, lane.packets = config.segment + layout.packets;
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

// Shows our control blocks to those who can't look for themselves. True: all took it.
bool cr_comm::push_controls() {
  bool all = true;
  for (u32 rank = 0; rank < ports.size(); rank++) {
    const Port& port = ports[rank];
    if (!port.put || segments[rank] || dead[rank]) continue;
    const LaneKind kinds[] = {COLLECTIVE, SEND, RECV}, theirs[] = {COLLECTIVE, RECV, SEND};
    for (u32 k = 0; k < 3; k++) {
      // `entered` has its own way, in order: an older value must not overtake it.
      const char* from = (const char*)control(kinds[k], rank) + sizeof(u64);
      u64 at = layout.mirror(theirs[k], config.rank) + sizeof(u64);
      all &= port.put(port.context, at, from, sizeof(Control) - sizeof(u64)) != 0;
    }
  }
  return all;
}

void cr_comm::publish_state(int code, u64 sequence, u32 culprit) {
  Control& c = *control(COLLECTIVE, config.rank);
  store_relaxed(&c.failed, sequence);
  store_relaxed(&c.culprit, culprit);
  store_release(&c.state, code);
  if (has_ports)
    for (u32 tries = 0; !push_controls() && tries < 100; tries++) poll_ports();
}

bool cr_comm::complaint(cr_failure& f) const {
  for (u32 rank = 0; rank < config.shape.ranks; rank++) {
    if (rank == config.rank || !view(rank)) continue;
    if (load_acquire(&view(rank)->state) != CR_MISMATCH || load_relaxed(&view(rank)->culprit) != config.rank) continue;
    f.code = CR_MISMATCH;
    f.peer = rank;
    f.sequence = load_relaxed(&view(rank)->failed);
    f.block = f.operation = f.op_code = f.waits_for = UNKNOWN;
    f.theirs[0] = load_relaxed(&view(rank)->tag), f.theirs[1] = load_relaxed(&view(rank)->what);
    f.theirs[2] = load_relaxed(&view(rank)->count), f.theirs[3] = load_relaxed(&view(rank)->root);
    const Control& own = *collectives.lane.control;
    f.mine[0] = own.tag, f.mine[1] = own.what, f.mine[2] = own.count, f.mine[3] = own.root;
    return true;
  }
  return false;
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
