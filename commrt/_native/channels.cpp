// What users' kernels on the CPU need of the host: ports that several threads share, and a wait that sees trouble.
#include <sched.h>
#include <unistd.h>

#include <mutex>
#include <new>

#include "../../algorithms/device/channel.h"
#include "engine.h"

using namespace commrt;

static_assert((u32)PEER_LOST == (u32)CR_PEER_LOST && (u32)TIMED_OUT == (u32)CR_TIMEOUT && (u32)WAS_ABORTED == (u32)CR_ABORTED &&
              (u32)LINK_FAILED == (u32)CR_TRANSPORT && (u32)OUT_OF_BOUNDS == (u32)CR_BOUNDS);

namespace {

constexpr u64 YIELD_NS = 200000;  // of waiting, before naps
constexpr u32 NAP_US = 50;

// A port is called by one thread at a time.
struct LockedPort {
  cr_port outer, inner;
  SpinLock lock;
};

LockedPort& locked(void* context) { return *(LockedPort*)context; }

int put(void* c, unsigned long long offset, const void* source, unsigned long long nbytes) {
  std::lock_guard<SpinLock> hold(locked(c).lock);
  return locked(c).inner.put(locked(c).inner.context, offset, source, nbytes);
}
int signal(void* c, unsigned long long offset, unsigned long long value) {
  std::lock_guard<SpinLock> hold(locked(c).lock);
  return locked(c).inner.signal(locked(c).inner.context, offset, value);
}
int get(void* c, void* to, unsigned long long from, unsigned long long nbytes) {
  std::lock_guard<SpinLock> hold(locked(c).lock);
  return locked(c).inner.get(locked(c).inner.context, to, from, nbytes);
}
int flush(void* c) {
  std::lock_guard<SpinLock> hold(locked(c).lock);
  return locked(c).inner.flush(locked(c).inner.context);
}
int poll(void* c) {
  std::lock_guard<SpinLock> hold(locked(c).lock);
  return locked(c).inner.poll(locked(c).inner.context);
}

int put_mapped(void*, unsigned long long address, const void* source, unsigned long long nbytes) {
  move((char*)address, (const char*)source, nbytes);
  return 1;
}
int signal_mapped(void*, unsigned long long address, unsigned long long value) {
  store_release((u64*)address, value);
  return 1;
}
int get_mapped(void*, void* to, unsigned long long address, unsigned long long nbytes) {
  move((char*)to, (const char*)address, nbytes);
  return 1;
}
int always(void*) { return 1; }
int never(void*) { return 0; }

int lost(const cr_comm& comm, u32 peer, bool look_closely) {
  u64 state = load_acquire(&comm.view(peer)->state);
  if (state == CR_OK) return look_closely && comm.life[peer] >= 0 && !cr_memory_owner_lives(comm.life[peer]) ? CR_PEER_LOST : CR_OK;
  return state == CR_CLOSED || state == CR_PEER_LOST ? CR_PEER_LOST : CR_ABORTED;
}

}  // namespace

extern "C" {

cr_port* cr_port_locked(const cr_port* inner) {
  auto* port = new (std::nothrow) LockedPort;
  if (!port) return nullptr;
  port->outer = {port, put, signal, inner->get ? get : nullptr, flush, poll};
  port->inner = *inner;
  return &port->outer;
}
void cr_port_locked_free(cr_port* port) { delete (LockedPort*)port->context; }

void cr_port_mapped(cr_port* port) { *port = {nullptr, put_mapped, signal_mapped, get_mapped, always, never}; }

const unsigned long long* cr_comm_abort_word(cr_comm* comm) { return &comm->abort; }

int cr_comm_tend(void* communicator, unsigned peer, unsigned long long* began_ns, unsigned long long timeout_ns) {
  const cr_comm& comm = *(const cr_comm*)communicator;
  u64 now = (u64)now_ns();
  if (!*began_ns) *began_ns = now;
  u64 waited = now - *began_ns;
  if (load_acquire(&comm.abort) || comm.state.load(std::memory_order_acquire)) return CR_ABORTED;
  for (u32 rank = 0; rank < comm.ports.size(); rank++) {
    const Port& port = comm.ports[rank];
    if (port.poll && port.poll(port.context) < 0 && rank == peer) return CR_PEER_LOST;
  }
  if (int gone = lost(comm, peer, waited > YIELD_NS)) return gone;
  if (waited > timeout_ns) return CR_TIMEOUT;
  if (waited < YIELD_NS) sched_yield();
  else usleep(NAP_US);
  return CR_OK;
}
}
