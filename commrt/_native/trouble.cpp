// What can keep an operation from ending well: who looks for it, and what then happens to a communicator.
#include "engine.h"

using namespace commrt;

// What a block met itself, if all of it is known; if not, check() gives it time. A link that fails may belong to a rank
// that is dying, and behind a port it takes a while to learn what a peer called.
bool cr_engine::block_failure(const cr_launch& w, cr_failure& f) {
  int carriage = w.carriage.load(std::memory_order_acquire);
  if (w.phase == cr_launch::CARRIED && carriage > CR_OK) {
    explain(w, f);
    f.code = carriage, f.peer = UNKNOWN;
    return true;
  }
  if (w.phase != cr_launch::RUNNING) return false;
  for (u32 k = 0; k < w.launch.program->nblocks; k++) {
    u32 why = w.blocks[k].failure, culprit = w.blocks[k].culprit;
    if (!why || why == TRANSPORT) continue;
    explain(w, f);
    f.code = why == MISMATCH ? CR_MISMATCH : CR_BOUNDS;
    f.peer = culprit == UNKNOWN ? UNKNOWN : w.lane->members[culprit];
    return why == BOUNDS || blame(w, f);
  }
  return false;
}

// The first to break a communicator says why. True: that was this call.
bool cr_engine::breaks(cr_comm& comm, const cr_failure& f, const cr_lane* lane, i64 looked_ns) {
  std::lock_guard<SpinLock> hold(gate_);
  if (comm.state.load(std::memory_order_relaxed)) return false;
  comm.failure = f;
  if (lane) stand(*lane, looked_ns, comm.standing, now_ns());
  comm.state.store(f.code, std::memory_order_release);
  if (comm.device) store_release(comm.device->abort, 1);
  return true;
}

void cr_engine::fail(cr_comm& comm, const cr_launch* w, const cr_failure& f) {
  if (breaks(comm, f, w ? w->lane : nullptr, w ? w->looked_ns : 0)) end(comm, f);
}

void cr_engine::end(cr_comm& comm, const cr_failure& f) {
  comm.publish(f);
  abandon(comm, f.code);
  ring(comm);
}

// Looks at everything that can keep a head from ending well. Rare: only when nothing has moved for a while.
void cr_engine::look(i64 now) {
  looked_ns_ = now;
  for (u32 i = 0; i < active_.size(); i++) {
    cr_comm& comm = *active_[i].lane->comm;
    comm.scan(now);
    cr_failure f{};
    if (!active_[i].launch) continue;
    f.code = check(*active_[i].launch, now, f);
    if (f.code) fail(comm, active_[i].launch, f);
  }
  find_deadlock();
}

// Where all ranks of a group are here, a pass has moved none, and the oldest operation that some rank is stuck in has
// ended, or is stuck, on every other: nothing will ever move it.
void cr_engine::find_deadlock() {
  if (pass()) return;
  for (u32 i = 0; i < active_.size(); i++) {
    cr_group* group = active_[i].lane->comm->group;
    if (!group || !group->stuck.empty() || !all_stuck(*group)) continue;
    for (const Running& r : active_)
      if (stuck(r, *group)) places(*r.launch, group->stuck);
    for (cr_comm* comm : group->members) {
      const cr_launch* w = nullptr;
      for (const Running& r : active_)
        if (r.lane == &comm->collectives) w = r.launch;
      cr_failure f{};
      f.block = f.operation = f.op_code = f.waits_for = UNKNOWN, f.finder = comm->config.rank;
      if (w) explain(*w, f);
      f.code = CR_DEADLOCK;
      f.peer = f.waits_for;
      fail(*comm, w, f);
    }
  }
}

bool cr_engine::stuck(const Running& r, const cr_group& group) {
  return r.launch && r.lane->comm->group == &group && r.lane->kind == COLLECTIVE && r.launch->phase != cr_launch::WAITING;
}

bool cr_engine::all_stuck(const cr_group& group) const {
  u64 oldest = ~0ull;
  for (const Running& r : active_) {
    bool carried = r.launch && r.launch->phase == cr_launch::CARRIED;
    if (carried && r.lane->comm->group == &group) return false;
    if (stuck(r, group)) oldest = least(oldest, r.launch->sequence);
  }
  if (oldest == ~0ull || has_incoming_.load(std::memory_order_relaxed)) return false;
  for (const cr_comm* comm : group.members) {
    if (!comm || comm->has_ports || comm->state.load(std::memory_order_relaxed)) return false;
    const Control& c = *comm->collectives.lane.control;
    if (c.completed < oldest && c.sequence < oldest) return false;
  }
  return true;
}

// Returns once nothing of it runs any more.
void cr_engine::abort(cr_comm& comm) {
  cr_failure f{};
  f.code = CR_ABORTED;
  f.peer = f.waits_for = f.block = f.operation = f.op_code = UNKNOWN;
  f.finder = comm.config.rank;
  comm.aborting.fetch_add(1, std::memory_order_acq_rel);
  if (breaks(comm, f, nullptr, 0)) {
    __atomic_store_n(&comm.abort, 1, __ATOMIC_RELEASE);
    seize();
    end(comm, f);
    release_claim();
  }
  comm.aborting.fetch_sub(1, std::memory_order_acq_rel);
}
