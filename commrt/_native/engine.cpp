#include "engine.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

using namespace commrt;

namespace {

// Idle passes before each step up; see docs/architecture.md. Yields that end in sleep were in vain, and put a rank far back
// when it wakes: the next time there are half as many.
constexpr u32 SPINS = 100, YIELDS = 200, YIELDS_LEAST = 4, PORT_NAP_US = 50;
constexpr i64 LOOK_NS = 1000000, NAP_NS = 1000000;

void futex_wait(u32* word, u32 seen, i64 ns) {
  timespec t{(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, nullptr, 0);
}
void futex_wake(u32* word, int n) { syscall(SYS_futex, word, FUTEX_WAKE, n, nullptr, nullptr, 0); }

}  // namespace

i64 commrt::now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void SpinLock::sched_yield_once() { sched_yield(); }

cr_engine::~cr_engine() { stop(); }

void cr_engine::stop() {
  stop_ = true;
  {
    std::lock_guard<std::mutex> hold(thread_lock_);
    thread_wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

// ---- queues ----------------------------------------------------------------------------------------------------------

cr_launch* cr_engine::take() {
  std::lock_guard<SpinLock> hold(gate_);
  if (free_.empty()) {
    pool_.push_back(std::make_unique<cr_launch>());
    free_.reserve(pool_.capacity());
    free_.push_back(pool_.back().get());
  }
  cr_launch* w = free_.back();
  free_.pop_back();
  return w;
}

void cr_engine::release(cr_launch* w) {
  if (w->owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  std::lock_guard<SpinLock> hold(gate_);
  free_.push_back(w);
}

int cr_engine::submit(cr_lane& lane, cr_launch* w) {
  w->engine = this;
  w->lane = &lane;
  w->next = nullptr;
  w->phase = cr_launch::WAITING;
  w->sequence = w->announced = 0;
  w->looked_ns = w->lost_ns = 0;
  w->bad_link = UNKNOWN;
  w->carriage.store(cr_launch::APART, std::memory_order_relaxed);
  w->state.store(CR_PENDING, std::memory_order_relaxed);
  w->owners.store(2, std::memory_order_relaxed);
  std::lock_guard<SpinLock> hold(gate_);
  if (lane.comm->state.load(std::memory_order_relaxed)) return CR_CLOSED;
  if (lane.tail) lane.tail->next = w;
  else {
    lane.head = w;
    incoming_.push_back(&lane);
    has_incoming_.store(true, std::memory_order_relaxed);
  }
  lane.tail = w;
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  return CR_OK;
}

void cr_engine::adopt() {
  if (!has_incoming_.load(std::memory_order_relaxed)) return;
  std::lock_guard<SpinLock> hold(gate_);
  for (cr_lane* lane : incoming_) active_.push_back({lane, lane->head});
  incoming_.clear();
  has_incoming_.store(false, std::memory_order_relaxed);
}

// Takes the head of its lane out of the queue; answers what follows it.
cr_launch* cr_engine::finish(cr_lane& lane, cr_launch* w, int state) {
  cr_launch* next;
  {
    std::lock_guard<SpinLock> hold(gate_);
    next = lane.head = w->next;
    if (!next) lane.tail = nullptr;
  }
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  w->state.store(state, std::memory_order_release);
  release(w);
  ended_ = true;
  return next;
}

void cr_engine::wake_waiters() {
  turn_.fetch_add(1, std::memory_order_release);
  futex_wake((u32*)&turn_, 1 << 30);
}

// ---- driving ---------------------------------------------------------------------------------------------------------

bool cr_engine::run(u32 index, bool alone) {
  cr_lane& lane = *active_[index].lane;
  bool moved = false;
  while (cr_launch* w = active_[index].launch) {
    bool finished = false;
    bool some = advance(*w, alone, finished);
    moved |= some;
    if (finished) {
      active_[index].launch = finish(lane, w, CR_OK);
      continue;
    }
    if (some && w->phase == cr_launch::CARRIED) ended_ = true;  // somebody waits to carry it
    cr_failure f{};
    if (block_failure(*w, f)) return fail(*lane.comm, w, f), true;
    break;
  }
  return moved;
}

bool cr_engine::pass() {
  adopt();
  bool moved = false, alone = active_.size() == 1;
  for (u32 i = 0; i < active_.size(); i++) {
    cr_comm& comm = *active_[i].lane->comm;
    if (comm.has_ports) moved |= comm.poll_ports();
    moved |= run(i, alone && !comm.config.oversubscribed);
  }
  auto idle = [](const Running& r) { return !r.launch; };
  active_.erase(std::remove_if(active_.begin(), active_.end(), idle), active_.end());
  if (ended_) wake_the_ended();
  return moved;
}

// Once a pass, however many launches ended in it.
void cr_engine::wake_the_ended() {
  ended_ = false;
  if (waiting_.load(std::memory_order_relaxed)) wake_waiters();
}

template <class Stop> void cr_engine::drive(Stop stop, i64 limit) {
  for (u32 idle = 0; !stop();) {
    if (wanted_.load(std::memory_order_relaxed)) return;
    if (pass()) {
      if (idle) yields_ = least(YIELDS, yields_ + 1 + yields_ / 4);
      idle = 0;
      continue;
    }
    if (stop()) return;
    u32 spins = oversubscribed() ? 0 : SPINS;
    if (idle == 0) ring_all();
    if (++idle < spins) { relax(); continue; }
    if (idle < spins + yields_) { sched_yield(); continue; }
    i64 now = now_ns();
    if (now > limit) return;
    if (now - looked_ns_ > LOOK_NS) look(now);
    yields_ = yields_ / 2 > YIELDS_LEAST ? yields_ / 2 : YIELDS_LEAST;
    if (sleep()) idle = 0;
  }
}

// Announces, looks once more, sleeps. True: something moved meanwhile.
bool cr_engine::sleep() {
  cr_comm* comm = active_.empty() ? nullptr : active_[0].lane->comm;
  Doorbell* own = comm ? comm->doorbell(comm->config.rank) : nullptr;
  Doorbell* all = comm ? comm->doorbell(0) : nullptr;
  if (!own || !all || comm->has_ports) {
    usleep(PORT_NAP_US);
    return false;
  }
  u32 seen = __atomic_load_n(&own->bell, __ATOMIC_ACQUIRE);
  set_bed(own);
  __atomic_store_n(&own->asleep, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&all->sleepers, 1, __ATOMIC_SEQ_CST);
  bool moved = pass();
  if (!moved) futex_wait(&own->bell, seen, NAP_NS);
  __atomic_fetch_sub(&all->sleepers, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&own->asleep, 0, __ATOMIC_RELAXED);
  set_bed(nullptr);
  return moved;
}

void cr_engine::set_bed(Doorbell* bell) {
  std::lock_guard<SpinLock> hold(bed_lock_);
  bed_ = bell;
}

// For threads of this process that have something for the driver. Under the lock, since its communicator may close.
void cr_engine::wake_driver() {
  std::lock_guard<SpinLock> hold(bed_lock_);
  if (!bed_) return;
  __atomic_fetch_add(&bed_->bell, 1, __ATOMIC_RELEASE);
  futex_wake(&bed_->bell, 1 << 30);
}

// Our signals come before this look at who sleeps; a sleeper announces itself, then polls once more.
void cr_engine::ring(cr_comm& comm) {
  Doorbell* all = comm.doorbell(0);
  if (!all) return;
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (!__atomic_load_n(&all->sleepers, __ATOMIC_RELAXED)) return;
  for (u32 rank = 0; rank < comm.config.shape.ranks; rank++)
    if (rank != comm.config.rank) nudge(comm.doorbell(rank));
}

void cr_engine::nudge(Doorbell* bell) {
  if (!bell || !__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED)) return;
  __atomic_fetch_add(&bell->bell, 1, __ATOMIC_RELEASE);
  futex_wake(&bell->bell, 1 << 30);
}

void cr_engine::ring_all() {
  for (const Running& r : active_) ring(*r.lane->comm);
}

bool cr_engine::oversubscribed() const {
  for (const Running& r : active_)
    if (r.lane->comm->config.oversubscribed) return true;
  return false;
}

// ---- waiting ---------------------------------------------------------------------------------------------------------

// The claim for a short job. Whoever drives gives way.
void cr_engine::seize() {
  wanted_.fetch_add(1, std::memory_order_relaxed);
  wake_driver();
  while (!claim_.try_lock()) usleep(PORT_NAP_US);
  wanted_.fetch_sub(1, std::memory_order_relaxed);
}

void cr_engine::release_claim() {
  claim_.unlock();
  if (waiting_.load(std::memory_order_seq_cst)) wake_waiters();
}

template <class Done> void cr_engine::wait_until(Done done, cr_launch* w, i64 limit) {
  bool counted = false;
  while (!done()) {
    u32 seen = turn_.load(std::memory_order_acquire);
    if (wanted_.load(std::memory_order_relaxed)) {
      usleep(PORT_NAP_US);
    } else if (claim_.try_lock()) {
      // While it is not done nobody can close its communicator, which takes the claim; afterwards that may be gone.
      if (!done()) {
        drive(done, limit);
        if (done()) ring(*w->lane->comm);
      }
      release_claim();
    } else {
      if (!counted) {
        waiting_.fetch_add(1, std::memory_order_seq_cst);
        counted = true;
        wake_driver();
        continue;
      }
      if (!done()) futex_wait((u32*)&turn_, seen, NAP_NS);
    }
    if (limit != INT64_MAX && now_ns() > limit) break;
  }
  if (counted) waiting_.fetch_sub(1, std::memory_order_relaxed);
}

int cr_engine::wait(cr_launch* w, i64 limit) {
  wait_until([w] { return w->state.load(std::memory_order_acquire) != CR_PENDING; }, w, limit);
  return w->state.load(std::memory_order_acquire);
}

int cr_engine::wait_agreed(cr_launch* w, i64 limit) {
  auto agreed = [w] { return w->carriage.load(std::memory_order_acquire) != cr_launch::APART; };
  wait_until([&] { return agreed() || w->state.load(std::memory_order_acquire) != CR_PENDING; }, w, limit);
  int state = w->state.load(std::memory_order_acquire);
  return state == CR_PENDING && agreed() ? CR_OK : state;
}

void cr_engine::nudge_progress() {
  if (claim_.try_lock()) {
    if (pass()) ring_all();
    release_claim();
  } else wake_driver();
  if (!thread_.joinable()) return;
  std::lock_guard<std::mutex> hold(thread_lock_);
  thread_wake_.notify_one();
}

bool cr_engine::busy(cr_comm& comm) {
  std::lock_guard<SpinLock> hold(gate_);
  bool any = comm.collectives.head;
  for (const auto& pair : comm.pairs) any |= pair && pair->head;
  return any;
}

bool cr_engine::drain(cr_comm& comm, i64 limit) {
  while (busy(comm)) {
    if (!wanted_.load(std::memory_order_relaxed) && claim_.try_lock()) {
      drive([&] { return !busy(comm); }, limit);
      release_claim();
    } else usleep(PORT_NAP_US);
    if (now_ns() > limit) return false;
  }
  return true;
}

// Whether every peer has begun what this rank has sent it, has left, or has complained; CR_PENDING: not yet.
int cr_engine::settle(cr_comm& comm) {
  cr_failure f{};
  cr_lane* where = nullptr;
  bool pending = false;
  i64 now = now_ns();
  if (comm.has_ports) comm.poll_ports();
  comm.scan(now);
  if (!comm.complaint(f) && comm.agreed(f, where, pending)) return pending ? CR_PENDING : CR_OK;
  if (!breaks(comm, f, where, 0)) return comm.state.load(std::memory_order_acquire);
  comm.publish(f);
  return (int)f.code;
}

// Accepted work is finished first; a one-way sender learns here that its peers have refused what it sent.
int cr_engine::close(cr_comm& comm, i64 limit) {
  bool drained = drain(comm, limit);
  auto broken = [&] { return comm.state.load(std::memory_order_acquire) != CR_OK; };
  for (int answer = CR_PENDING; answer == CR_PENDING && drained && !broken() && now_ns() <= limit;) {
    seize();
    answer = settle(comm);
    release_claim();
    if (answer == CR_PENDING) usleep(PORT_NAP_US);
  }
  cr_failure f{};
  f.code = drained ? CR_CLOSED : CR_PEER_LOST;
  f.sequence = comm.collectives.sequence;
  f.finder = comm.config.rank, f.peer = UNKNOWN;
  int code = CR_OK;
  {
    std::lock_guard<SpinLock> hold(gate_);
    code = comm.state.load(std::memory_order_relaxed);
    if (!code) comm.state.store(CR_CLOSED, std::memory_order_release);
  }
  seize();
  if (!code) end(comm, f);
  auto own = [&](const Running& r) { return r.lane->comm == &comm; };
  active_.erase(std::remove_if(active_.begin(), active_.end(), own), active_.end());
  if (comm.group) comm.group->members[comm.config.rank] = nullptr;
  release_claim();
  while (comm.aborting.load(std::memory_order_acquire)) sched_yield();
  return code ? code : drained ? CR_OK : CR_TIMEOUT;
}

void cr_engine::abandon(cr_comm& comm, int code) {
  adopt();
  for (Running& r : active_)
    while (r.lane->comm == &comm && r.launch) r.launch = finish(*r.lane, r.launch, code);
}

void cr_engine::start_thread() {
  std::lock_guard<std::mutex> hold(thread_lock_);
  if (!thread_.joinable()) thread_ = std::thread([this] { background(); });
}

// Drives where nobody waits; whoever waits drives better, so it gives way to them.
void cr_engine::background() {
  auto stop = [this] { return stop_ || !in_flight_.load() || waiting_.load() || wanted_.load(); };
  while (!stop_) {
    {
      std::unique_lock<std::mutex> hold(thread_lock_);
      auto wanted = [this] { return stop_ || in_flight_.load(); };
      thread_wake_.wait_for(hold, std::chrono::milliseconds(in_flight_.load() ? 1 : 200), wanted);
    }
    if (stop() || !claim_.try_lock()) {
      if (!stop_ && in_flight_.load()) usleep(NAP_NS / 1000);
      continue;
    }
    drive(stop, INT64_MAX);
    ring_all();
    release_claim();
  }
}
