// Collectives as kernels on a device: the lane in words that kernels read, launches, and the host's watch over them.
#include <new>

#include "engine.h"

using namespace commrt;

namespace {

constexpr i64 VERDICT_NS = 300000000;

// What lies in memory that host and kernels share.
struct Shared {
  Lane lane;
  u64 abort;
  Peer peers[];
};

Shared& shared(cr_comm& comm) { return *(Shared*)comm.device; }

// Where this rank and a peer meet: in the memory of their devices, or in host memory.
void meet(const cr_comm& comm, u32 peer, Peer& p, u64 own, u64 theirs) {
  const Layout& at = comm.layout;
  p.in = (Line*)(own + at.lines(COLLECTIVE, peer));
  p.out = (Line*)(theirs + at.lines(COLLECTIVE, comm.config.rank));
  p.scratch = (char*)(theirs + at.scratch);
  p.packets = (char*)(theirs + at.packets);
}

// The launch that the control block tells of, as far as it does.
void describe(cr_comm& comm, u64 sequence, cr_launch& w) {
  const Control& c = *comm.collectives.lane.control;
  static const Program none{};
  u64 at = sequence % HISTORY;
  w.engine = comm.engine, w.lane = &comm.collectives;
  w.phase = cr_launch::FLUSHING;
  w.bad_link = UNKNOWN;
  w.sequence = sequence;
  w.timeout_ns = comm.timeout_s < 0 ? -1 : (i64)(comm.timeout_s * 1e9);
  w.launch.program = &none;
  w.launch.tag = load_relaxed(&c.tags[at]), w.launch.what = load_relaxed(&c.what[at]);
  w.launch.count = load_relaxed(&c.count[at]), w.launch.root = load_relaxed(&c.root[at]);
  w.launch.shift = log2_itemsize(w.launch.what >> 8 & 0xff);
  comm.collectives.matched = sequence > HISTORY ? sequence - HISTORY : 0;
  cr_watched& seen = comm.watched;
  if (seen.sequence != sequence) seen = {sequence, 0, 0, 0};
  w.looked_ns = seen.looked_ns, w.lost_ns = seen.lost_ns;
}

// A kernel that met another operation gives those who called it time to show what it was.
int met(cr_comm& comm, i64 now, cr_failure& f) {
  u64 failure = load_acquire(&comm.device->failure);
  u32 culprit = (u32)(failure >> 32);
  if (!failure) return CR_OK;
  if (!comm.watched.failed_ns) comm.watched.failed_ns = now;
  if (now - comm.watched.failed_ns < VERDICT_NS) return CR_OK;
  if (culprit < comm.config.shape.ranks) f.peer = culprit;
  return (u32)failure == MISMATCH ? CR_MISMATCH : CR_BOUNDS;
}

}  // namespace

int cr_engine::watch(cr_comm& comm) {
  if (int broken = comm.state.load(std::memory_order_acquire)) return broken;
  const Control& c = *comm.collectives.lane.control;
  u64 sequence = load_acquire(&c.sequence);
  if (load_acquire(&c.completed) >= sequence && !load_acquire(&comm.device->failure)) return CR_OK;
  seize();
  i64 now = now_ns();
  comm.scan(now);
  cr_launch w{};
  describe(comm, sequence, w);
  cr_failure f{};
  int code = check(w, now, f);
  comm.watched.looked_ns = w.looked_ns, comm.watched.lost_ns = w.lost_ns;
  f.code = code ? code : met(comm, now, f);
  if (f.code) fail(comm, &w, f);
  release_claim();
  int state = comm.state.load(std::memory_order_acquire);
  return state ? state : CR_PENDING;
}

extern "C" {

unsigned long long cr_device_bytes(cr_comm* comm) { return sizeof(Shared) + comm->config.shape.ranks * sizeof(Peer); }
unsigned long long cr_device_launch_bytes(void) { return sizeof(Launch); }

void cr_device_open(cr_comm* comm, void* memory, unsigned long long segment, unsigned long long device) {
  comm->device = (Lane*)memory;
  Shared& s = shared(*comm);
  const Layout& at = comm->layout;
  s.lane = comm->collectives.lane;
  s.lane.abort = &s.abort;
  s.lane.peers = s.peers;
  s.lane.control = (Control*)(segment + at.control(COLLECTIVE, 0));
  s.lane.host = (char*)(segment + at.scratch);
  u64 base = device ? device : segment;
  s.lane.scratch = (char*)(base + at.scratch), s.lane.packets = (char*)(base + at.packets);
}

void cr_device_switch(cr_comm* comm, unsigned long long multicast) {
  shared(*comm).lane.multicast = multicast ? (char*)(multicast + comm->layout.scratch) : nullptr;
}

void cr_device_join(cr_comm* comm, unsigned peer, unsigned long long segment, unsigned long long device) {
  Shared& s = shared(*comm);
  const Layout& at = comm->layout;
  u64 host = (u64)s.lane.control - at.control(COLLECTIVE, 0), own = (u64)s.lane.scratch - at.scratch;
  Peer& p = s.peers[peer] = Peer{};
  meet(*comm, peer, p, device ? own : host, device ? device : segment);
  p.view = (Control*)(segment + at.control(COLLECTIVE, 0));
}

int cr_device_prepare(cr_comm* comm, const cr_call* call, void* launch, unsigned long long* done, unsigned* blocks) {
  cr_launch w{};
  int code = comm->state.load(std::memory_order_acquire);
  if (code || !prepare(comm->collectives, *call, w, code)) return code;
  Launch& L = w.launch;
  L.lane = comm->device;
  L.reduce = nullptr;
  L.windows = nullptr;
  L.done = (u64*)done;
  *done = 0;
  *blocks = L.program->nblocks;
  *(Launch*)launch = L;
  return CR_OK;
}

int cr_device_watch(cr_comm* comm) { return comm->engine->watch(*comm); }
}
