// A link between two ranks over one reliable queue pair.
//
// A put is an RDMA write. Verbs promise nothing about when the bytes of a write can be seen, or in which order those of two,
// until the receiver takes the completion of something sent behind them: a CPU that polls the memory that a write goes to
// may see a later write first (adapters that spread packets over paths, relaxed ordering of PCIe), or half of a word. So a
// signal is not a write to its word. It is a write with immediate of (offset, value) to a ring of this link in the receiver's
// memory; the receiver takes the completion, which makes all that was written before visible, and stores the value itself.
//
// The ring needs no credits: the n-th signal takes the n-th receive that the receiver posted, which it does again when it
// has read a slot. A signal that finds none is asked for again by the adapter (RNR). Even if its bytes were placed before
// that, they hurt nobody: the ring is twice as long as there are receives, and only one signal at a time can be so refused.
//
// Sources in registered memory are sent from where they are. All others are copied into slots first, which are registered.
#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <new>

#include "ib_device.h"

using namespace commrt;
using namespace commrt::ib;

namespace {

constexpr u32 SENDS = 128, RECEIVES = 512, RING = 2 * RECEIVES, REQUESTS = 64, SLOTS = 16, SLOT = 32 << 10, BATCH = 16;
constexpr u32 COPIED = 128;  // puts up to this are taken with their content
constexpr u64 LONGEST = 1ull << 30, GOODBYE = ~0ull, A_SEND = 0, A_RECEIVE = 1;
// 4.096 us << TIMEOUT for an answer, up to 1 + RETRIES times: about 2 s until a peer counts as gone, at most 4 times that by
// the specification. rxe takes 7 retries for endless. A receiver that is not ready is asked for ever.
constexpr u8 TIMEOUT = 16, RETRIES = 6, RNR_RETRIES = 7, RNR_TIMER = 12, READS = 1, HOPS = 64;

struct Record {
  u64 offset, value;
};

// A put or signal on its way. `source` null: `copy` holds the bytes.
struct Request {
  const char* source;
  u64 nbytes, done, to;
  u32 key, immediate;
  int opcode;
  char copy[COPIED];
};

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

}  // namespace

struct cr_ib_link {
  cr_ib_link(cr_ib& device, u32 port, u32 gid_index, u32 psn) : device_(device), port_(port), gid_index_(gid_index), psn_(psn) {}
  ~cr_ib_link();
  int open(cr_ib_why*);
  int join(const cr_ib_end&, cr_ib_why*);
  void end(cr_ib_end&) const;
  int put(u64 offset, const void* source, u64 nbytes);
  int signal(u64 offset, u64 value);
  int flush();
  int poll();
  bool leaving();  // true: nothing more to wait for
  bool know(u32 number, u64 address, u64 nbytes, u32 key) { return peer_.set(number, address, nbytes, key); }
  const char* trouble() const { return failed() ? trouble_ : ""; }

 private:
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool idle() const { return !queued_ && !sends_; }
  int fail(const char* format, ...);
  int allocate(char*& area, u64 nbytes, int access, Mr*& region, cr_ib_why*);
  int make_queues(cr_ib_why*);
  Qp* make_qp(u32 inlined);
  int to_init();
  int to_ready_to_receive(const cr_ib_end&);
  int to_ready_to_send();
  bool post_receive();
  Request* push();
  bool push_signal(const Record&);
  bool pump();
  bool batch();
  bool step(Request&, SendWr&, Sge&);
  bool source(Request&, Sge&, bool& inlined, bool& in_slot);
  void take(const Wc&);
  void receive(const Wc&);

  cr_ib& device_;
  u32 port_, gid_index_, psn_;
  PortAttr attributes_{};
  u8 gid_[16] = {};
  Cq* cq_ = nullptr;
  Qp* qp_ = nullptr;
  Mr *ring_region_ = nullptr, *slots_region_ = nullptr;
  char *ring_ = nullptr, *slots_area_ = nullptr;
  u32 inlined_most_ = 0;
  bool joined_ = false, said_ = false, left_ = false;  // we have said goodbye; the peer has
  Memories peer_;
  u64 peer_ring_ = 0;
  u32 peer_ring_key_ = 0;
  Request requests_[REQUESTS];
  u64 head_ = 0, signalled_ = 0, received_ = 0, posted_ = 0, next_slot_ = 0;
  u32 queued_ = 0, sends_ = 0, slots_ = 0;
  bool in_slot_[SENDS] = {};  // by number of the send
  std::atomic<bool> failed_{false};
  char trouble_[160] = {};

  enum : u64 { RING_NBYTES = RING * sizeof(Record), SLOTS_NBYTES = (u64)SLOTS * SLOT };
};

// ---- set-up ----------------------------------------------------------------------------------------------------------

int cr_ib_link::open(cr_ib_why* why) {
  if (int error = verbs().query_port(device_.context, (u8)port_, &attributes_)) return refuse(why, "port %u: %s", port_, strerror(error));
  if (verbs().query_gid(device_.context, (u8)port_, (int)gid_index_, gid_)) return refuse(why, "port %u has no GID %u", port_, gid_index_);
  if (allocate(ring_, RING_NBYTES, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, ring_region_, why) || make_queues(why)) return -1;
  if (int error = to_init()) return refuse(why, "a queue pair can't be set up: %s", strerror(error));
  for (u32 k = 0; k < RECEIVES; k++)
    if (!post_receive()) return refuse(why, "%s", trouble_);
  return 0;
}

int cr_ib_link::allocate(char*& area, u64 nbytes, int access, Mr*& region, cr_ib_why* why) {
  void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED) return refuse(why, "no memory for a link: %s", strerror(errno));
  area = (char*)at;
  madvise(area, nbytes, MADV_DONTFORK);
  region = verbs().reg_mr(device_.pd, area, nbytes, access);
  return region ? 0 : refuse(why, "memory of a link can't be registered: %s", strerror(errno));
}

int cr_ib_link::make_queues(cr_ib_why* why) {
  cq_ = verbs().create_cq(device_.context, SENDS + RECEIVES, nullptr, nullptr, 0);
  if (!cq_) return refuse(why, "no completion queue: %s", strerror(errno));
  for (u32 inlined : {COPIED, 0u})
    if (!qp_) qp_ = make_qp(inlined);
  return qp_ ? 0 : refuse(why, "no queue pair: %s", strerror(errno));
}

Qp* cr_ib_link::make_qp(u32 inlined) {
  QpInitAttr a{};
  a.send_cq = a.recv_cq = cq_;
  a.cap = {SENDS, RECEIVES, 1, 1, inlined};
  a.qp_type = QPT_RC;
  a.sq_sig_all = 1;
  Qp* qp = verbs().create_qp(device_.pd, &a);
  inlined_most_ = a.cap.max_inline_data < COPIED ? a.cap.max_inline_data : COPIED;
  return qp;
}

int cr_ib_link::to_init() {
  QpAttr a{};
  a.qp_state = QPS_INIT;
  a.port_num = (u8)port_;
  a.qp_access_flags = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
  return verbs().modify_qp(qp_, &a, QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS);
}

int cr_ib_link::to_ready_to_receive(const cr_ib_end& peer) {
  QpAttr a{};
  a.qp_state = QPS_RTR;
  a.path_mtu = (int)std::min(peer.mtu, (u32)attributes_.active_mtu);
  a.dest_qp_num = peer.qpn;
  a.rq_psn = peer.psn;
  a.max_dest_rd_atomic = READS;
  a.min_rnr_timer = RNR_TIMER;
  a.ah_attr.dlid = (uint16_t)peer.lid;
  a.ah_attr.port_num = (u8)port_;
  // Of InfiniBand's subnets, the first half of a GID is the name.
  a.ah_attr.is_global = attributes_.link_layer == LINK_LAYER_ETHERNET || memcmp(peer.gid, gid_, 8) != 0;
  memcpy(a.ah_attr.grh.dgid.raw, peer.gid, sizeof peer.gid);
  a.ah_attr.grh.sgid_index = (u8)gid_index_;
  a.ah_attr.grh.hop_limit = HOPS;
  return verbs().modify_qp(qp_, &a, QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN | QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER);
}

int cr_ib_link::to_ready_to_send() {
  QpAttr a{};
  a.qp_state = QPS_RTS;
  a.timeout = TIMEOUT, a.retry_cnt = RETRIES, a.rnr_retry = RNR_RETRIES;
  a.sq_psn = psn_;
  a.max_rd_atomic = READS;
  return verbs().modify_qp(qp_, &a, QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC);
}

int cr_ib_link::join(const cr_ib_end& peer, cr_ib_why* why) {
  if (allocate(slots_area_, SLOTS_NBYTES, 0, slots_region_, why)) return -1;
  peer_ring_ = peer.ring, peer_ring_key_ = peer.ring_key;
  int error = to_ready_to_receive(peer);
  if (!error) error = to_ready_to_send();
  if (error) return refuse(why, "the queue pair can't be joined to the peer's: %s", strerror(error));
  joined_ = true;
  return 0;
}

void cr_ib_link::end(cr_ib_end& e) const {
  e = {qp_->qp_num, psn_, ring_region_->rkey, attributes_.lid, (u32)attributes_.active_mtu, attributes_.link_layer, (u64)ring_, {}};
  memcpy(e.gid, gid_, sizeof e.gid);
}

cr_ib_link::~cr_ib_link() {
  if (qp_) verbs().destroy_qp(qp_);
  if (cq_) verbs().destroy_cq(cq_);
  if (ring_region_) verbs().dereg_mr(ring_region_);
  if (slots_region_) verbs().dereg_mr(slots_region_);
  if (ring_) munmap(ring_, RING_NBYTES);
  if (slots_area_) munmap(slots_area_, SLOTS_NBYTES);
}

int cr_ib_link::fail(const char* format, ...) {
  if (failed()) return -1;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(trouble_, sizeof trouble_, format, arguments);
  va_end(arguments);
  failed_.store(true, std::memory_order_release);
  return -1;
}

// ---- sending ---------------------------------------------------------------------------------------------------------

// Whoever has left needs nothing any more: what is for it is taken, and goes nowhere.
int cr_ib_link::put(u64 offset, const void* from, u64 nbytes) {
  if (left_) return 1;
  if (failed()) return -1;
  u64 to;
  u32 key;
  if (!peer_.find(offset, nbytes, to, key)) return fail("a put of %llu bytes at offset %#llx lies outside of its memory", nbytes, offset);
  if (!nbytes) return 1;
  Request* r = push();
  if (!r) return failed() ? -1 : 0;
  *r = {nbytes > COPIED ? (const char*)from : nullptr, nbytes, 0, to, key, 0, WR_RDMA_WRITE, {}};
  if (!r->source) memcpy(r->copy, from, nbytes);
  return 1;
}

int cr_ib_link::signal(u64 offset, u64 value) {
  if (left_) return 1;
  if (failed()) return -1;
  u64 to;
  u32 key;
  if (offset % 8 || !peer_.find(offset, 8, to, key)) return fail("a signal at offset %#llx lies outside of its memory", offset);
  bool taken = push_signal({offset, value});
  return failed() ? -1 : taken;
}

bool cr_ib_link::push_signal(const Record& record) {
  Request* r = push();
  if (!r) return false;
  u64 number = signalled_++;
  *r = {nullptr, sizeof record, 0, peer_ring_ + number % RING * sizeof record, peer_ring_key_, (u32)number, WR_RDMA_WRITE_WITH_IMM, {}};
  memcpy(r->copy, &record, sizeof record);
  return true;
}

Request* cr_ib_link::push() {
  if (queued_ == REQUESTS) pump();
  return queued_ == REQUESTS ? nullptr : &requests_[(head_ + queued_++) % REQUESTS];
}

bool cr_ib_link::pump() {
  bool moved = false;
  while (!failed() && batch()) moved = true;
  return moved;
}

// Posts what can be, many at once: each time costs a store to the device, or a system call.
bool cr_ib_link::batch() {
  SendWr wr[BATCH], *bad;
  Sge pieces[BATCH];
  u32 n = 0;
  for (; n < BATCH && queued_ && sends_ < SENDS && step(requests_[head_ % REQUESTS], wr[n], pieces[n]); n++)
    if (n) wr[n - 1].next = &wr[n];
  int error = n ? qp_->context->ops.post_send(qp_, wr, &bad) : 0;
  if (error) fail("a write can't be posted: %s", strerror(error));
  return n && !error;
}

// The next piece of a request. False: not now.
bool cr_ib_link::step(Request& r, SendWr& wr, Sge& piece) {
  bool inlined = false, in_slot = false;
  if (!source(r, piece, inlined, in_slot)) return false;
  wr = {A_SEND, nullptr, &piece, 1, r.opcode, SEND_SIGNALED | (inlined ? (unsigned)SEND_INLINE : 0u), htonl(r.immediate), {r.to + r.done, r.key}, {}};
  in_slot_[posted_++ % SENDS] = in_slot;
  sends_++, slots_ += in_slot, next_slot_ += in_slot;
  r.done += piece.length;
  if (r.done == r.nbytes) head_++, queued_--;
  return true;
}

// Where the next piece is sent from. False: not now, all slots are in use.
bool cr_ib_link::source(Request& r, Sge& piece, bool& inlined, bool& in_slot) {
  const char* from = (r.source ? r.source : r.copy) + r.done;
  u64 left = r.nbytes - r.done;
  inlined = left <= inlined_most_;
  if (inlined) return piece = {(u64)from, (u32)left, 0}, true;
  if (const Memories::Entry* held = r.source ? device_.memories.holding((u64)from, left) : nullptr)
    return piece = {(u64)from, (u32)std::min({left, LONGEST, (u64)attributes_.max_msg_sz}), held->key}, true;
  if (slots_ == SLOTS) return false;
  in_slot = true;
  piece = {(u64)slots_area_ + next_slot_ % SLOTS * SLOT, (u32)std::min(left, (u64)SLOT), slots_region_->lkey};
  memcpy((void*)piece.addr, from, piece.length);
  return true;
}

// ---- what comes in ---------------------------------------------------------------------------------------------------

bool cr_ib_link::post_receive() {
  RecvWr wr{}, *bad;
  wr.wr_id = A_RECEIVE;
  int error = qp_->context->ops.post_recv(qp_, &wr, &bad);
  return !error || (fail("a receive can't be posted: %s", strerror(error)), false);
}

// Of a completion that tells of an error, nothing but the status and wr_id is valid.
void cr_ib_link::take(const Wc& wc) {
  if (wc.wr_id == A_SEND) slots_ -= in_slot_[(posted_ - sends_--) % SENDS];
  if (wc.status == WC_SUCCESS && wc.wr_id == A_RECEIVE) receive(wc);
  if (wc.status != WC_SUCCESS && !left_) fail("a %s failed: %s", wc.wr_id == A_SEND ? "write" : "receive", verbs().wc_status_str(wc.status));
}

void cr_ib_link::receive(const Wc& wc) {
  if (wc.opcode != WC_RECV_RDMA_WITH_IMM || ntohl(wc.imm_data) != (u32)received_) return (void)fail("a signal is out of step");
  Record record = ((Record*)ring_)[received_++ % RING];
  if (record.offset == GOODBYE) return (void)(left_ = true);
  u64 word;
  u32 key;
  if (record.offset % 8 || !device_.memories.find(record.offset, 8, word, key))
    return (void)fail("a signal at offset %#llx lies outside of this rank's memory", record.offset);
  store_release((u64*)word, record.value);
  post_receive();
}

int cr_ib_link::poll() {
  Wc wc[BATCH];
  int n = cq_->context->ops.poll_cq(cq_, BATCH, wc);
  if (n < 0) fail("the completion queue failed");
  for (int k = 0; k < n; k++) take(wc[k]);
  if (n <= 0 && (left_ || failed())) return -1;
  return n > 0 || (!left_ && pump());
}

// Acknowledged: it arrives even if this process ends now.
int cr_ib_link::flush() {
  poll();
  if (left_) return 1;
  return failed() ? -1 : idle();
}

bool cr_ib_link::leaving() {
  if (!joined_ || left_ || failed()) return true;
  if (!said_) said_ = push_signal({GOODBYE, 0});
  poll();
  return said_ && idle();
}

// ---- the C interface -------------------------------------------------------------------------------------------------

namespace {
cr_ib_link& link(void* context) { return *(cr_ib_link*)context; }
int put(void* c, unsigned long long offset, const void* from, unsigned long long nbytes) { return link(c).put(offset, from, nbytes); }
int signal(void* c, unsigned long long offset, unsigned long long value) { return link(c).signal(offset, value); }
int flush(void* c) { return link(c).flush(); }
int poll(void* c) { return link(c).poll(); }
}  // namespace

extern "C" {

int cr_ib_link_new(cr_ib* ib, unsigned port, unsigned gid_index, unsigned psn, cr_ib_link** out, cr_ib_why* why) {
  auto* made = new (std::nothrow) cr_ib_link(*ib, port, gid_index, psn);
  if (!made) return refuse(why, "no memory for a link");
  if (!made->open(why)) return *out = made, 0;
  delete made;
  return -1;
}

void cr_ib_link_end(const cr_ib_link* l, cr_ib_end* out) { l->end(*out); }
int cr_ib_link_join(cr_ib_link* l, const cr_ib_end* peer, cr_ib_why* why) { return l->join(*peer, why); }
int cr_ib_link_memory(cr_ib_link* l, unsigned number, unsigned long long address, unsigned long long nbytes, unsigned key) {
  return l->know(number, address, nbytes, key) ? 0 : -1;
}
void cr_ib_link_port(cr_ib_link* l, cr_port* out) { *out = {l, put, signal, nullptr, flush, poll}; }
const char* cr_ib_link_trouble(const cr_ib_link* l) { return l->trouble(); }
void cr_ib_links_leave(cr_ib_link* const* links, unsigned n, double patience_s) {
  bool all = false;
  for (double until = now_s() + patience_s; !all && now_s() < until;) {
    all = true;
    for (u32 k = 0; k < n; k++) all &= links[k]->leaving();
    if (!all) sched_yield();
  }
  for (u32 k = 0; k < n; k++) delete links[k];
}
}
