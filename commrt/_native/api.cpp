// The C interface: arguments in, codes out; no exception leaves.
#include <string.h>

#include "engine.h"
#include "reduce.h"

using namespace commrt;

namespace {

constexpr u32 MAX_SEGMENTS = 1024;

i64 to_ns(double seconds) { return seconds < 0 || seconds > 1e9 ? -1 : (i64)(seconds * 1e9); }
i64 limit(double seconds) {
  i64 ns = to_ns(seconds);
  return ns < 0 ? INT64_MAX : now_ns() + ns;
}

int start(cr_lane& lane, const cr_call& call, double timeout_s, cr_launch*& w) {
  cr_engine& engine = *lane.comm->engine;
  int code = CR_OK;
  w = engine.take();
  w->timeout_ns = to_ns(timeout_s);
  if (prepare(lane, call, *w, code)) code = engine.submit(lane, w);
  if (code == CR_OK) return CR_OK;
  w->owners.store(1, std::memory_order_relaxed);
  engine.release(w);
  return code;
}

}  // namespace

extern "C" {

unsigned cr_itemsize(unsigned dtype) {
  u32 shift = log2_itemsize(dtype);
  return shift > 4 ? 0 : 1u << shift;
}
int cr_can_reduce(unsigned dtype, unsigned reduction) { return cr_reduce_lookup(dtype, reduction) != nullptr; }

unsigned long long cr_segment_bytes(const cr_shape* shape) { return Layout(*shape).total; }

cr_engine* cr_engine_new(void) { return new (std::nothrow) cr_engine; }
void cr_engine_stop(cr_engine* engine) { engine->stop(); }
void cr_engine_free(cr_engine* engine) { delete engine; }
int cr_engine_progress_thread(cr_engine* engine) try {
  engine->start_thread();
  return CR_OK;
} catch (...) {
  return CR_NO_MEMORY;
}

cr_group* cr_group_new(unsigned ranks) try {
  return new cr_group{std::vector<cr_comm*>(ranks), {}};
} catch (const std::bad_alloc&) {
  return nullptr;
}
void cr_group_free(cr_group* group) { delete group; }
unsigned cr_group_stuck(cr_group* group, cr_place* out, unsigned most) {
  unsigned n = group->stuck.size() < most ? (unsigned)group->stuck.size() : most;
  for (unsigned k = 0; k < n; k++) out[k] = group->stuck[k];
  return n;
}

cr_comm* cr_comm_new(cr_engine* engine, const cr_config* config, cr_group* group) try {
  if (config->rank >= config->shape.ranks || config->lap < 4 || config->lap % 2) return nullptr;
  return new cr_comm(engine, *config, group);
} catch (const std::bad_alloc&) {
  return nullptr;
}
void cr_comm_free(cr_comm* comm) { delete comm; }

int cr_comm_connect(cr_comm* comm, unsigned peer, char* segment, const cr_port* port, const cr_port* direct, int life) {
  if (peer >= comm->config.shape.ranks) return CR_INVALID;
  static_assert(sizeof(cr_port) == sizeof(Port));
  if (peer != comm->config.rank) comm->segments[peer] = segment;
  if (port) memcpy(&comm->ports[peer], port, sizeof *port);
  if (direct) memcpy(&comm->directs[peer], direct, sizeof *direct);
  comm->life[peer] = life;
  comm->has_ports |= port && !segment;
  comm->connect_lane(comm->collectives, peer);
  return CR_OK;
}

int cr_comm_window(cr_comm* comm, unsigned peer, unsigned segment, unsigned long long base, unsigned long long size) try {
  if (peer >= comm->config.shape.ranks) return CR_INVALID;
  auto &bases = comm->window_base[peer], &sizes = comm->window_size[peer];
  if (segment > bases.size() || segment >= MAX_SEGMENTS) return CR_INVALID;
  bases.reserve(MAX_SEGMENTS), sizes.reserve(MAX_SEGMENTS);  // never moves: launches in flight look at it
  if (segment == bases.size()) bases.push_back(base), sizes.push_back(size);
  else bases[segment] = base, sizes[segment] = size;
  comm->show_windows(peer, {bases.data(), sizes.data(), (u32)bases.size()});
  return CR_OK;
} catch (const std::bad_alloc&) {
  return CR_NO_MEMORY;
}

void cr_comm_abort(cr_comm* comm) { comm->engine->abort(*comm); }
int cr_comm_state(cr_comm* comm) { return comm->state.load(std::memory_order_acquire); }
void cr_comm_failure(cr_comm* comm, cr_failure* out) {
  std::lock_guard<SpinLock> hold(comm->engine->gate());
  *out = comm->failure;
}
void cr_comm_standing(cr_comm* comm, cr_standing* out) {
  std::lock_guard<SpinLock> hold(comm->engine->gate());
  for (size_t k = 0; k < comm->standing.size(); k++) out[k] = comm->standing[k];
}
int cr_comm_close(cr_comm* comm, double timeout_s) { return comm->engine->close(*comm, limit(timeout_s)); }

cr_lane* cr_comm_collectives(cr_comm* comm) { return &comm->collectives; }
cr_lane* cr_comm_pair(cr_comm* comm, unsigned peer, int send) try {
  return peer < comm->config.shape.ranks ? comm->pair(peer, send) : nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}

unsigned cr_lane_rank(cr_lane* lane) { return lane->lane.rank; }

int cr_run(cr_lane* lane, const cr_call* call, double timeout_s, double slice_s, cr_launch** pending) try {
  cr_engine& engine = *lane->comm->engine;  // the communicator may be closed under a waiting thread
  cr_launch* w;
  int code = start(*lane, *call, timeout_s, w);
  if (code) return code;
  code = engine.wait(w, limit(slice_s));
  if (code == CR_PENDING) return *pending = w, code;
  engine.release(w);
  return code;
} catch (const std::bad_alloc&) {
  return CR_NO_MEMORY;
}

int cr_start(cr_lane* lane, const cr_call* call, double timeout_s, cr_launch** out) try {
  int code = start(*lane, *call, timeout_s, *out);
  if (!code) lane->comm->engine->nudge_progress();
  return code;
} catch (const std::bad_alloc&) {
  return CR_NO_MEMORY;
}

int cr_wait(cr_launch* w, double timeout_s) { return w->engine->wait(w, limit(timeout_s)); }
int cr_poll(cr_launch* w) { return w->state.load(std::memory_order_acquire); }
void cr_release(cr_launch* w) { w->engine->release(w); }
void cr_retain(cr_launch* w) { w->owners.fetch_add(1, std::memory_order_relaxed); }
int cr_agreed(cr_launch* w, double timeout_s) { return w->engine->wait_agreed(w, limit(timeout_s)); }
void cr_carried(cr_launch* w, int code) {
  w->carriage.store(code, std::memory_order_release);
  w->engine->nudge_progress();
}
}
