// A port over a connected stream socket. What it takes waits in a bounded queue and leaves with the next poll, flush, or
// signal behind much data; what comes in goes straight to registered memory. Nothing from the peer is trusted.
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <memory>
#include <new>

#include "../../algorithms/device/platform.h"
#include "api.h"

using namespace commrt;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers travel as they lie in memory");

struct cr_regions {
  enum : u32 { MOST = 1024, SHIFT = 48 };
  struct { char* base; u64 nbytes; } all[MOST];
  std::atomic<u32> n{0};

  char* find(u64 offset, u64 nbytes) const {
    u64 number = offset >> SHIFT, within = offset & ((1ull << SHIFT) - 1);
    if (number >= n.load(std::memory_order_acquire)) return nullptr;
    bool inside = within <= all[number].nbytes && nbytes <= all[number].nbytes - within;
    return inside ? all[number].base + within : nullptr;
  }
};

namespace {

// INLINE_BYTES as in commrt/transport.py. Puts up to SMALL_BYTES are written word by word once they are whole: others may
// be looking at control blocks and lines. A signal behind EAGER_BYTES of puts sends at once; one poll takes in about
// TURN_BYTES. Unanswered repetitions in a row until a link counts as cut: of 0.2, 0.4, ... s, about 12 s together.
enum : u64 { INLINE_BYTES = 128, SMALL_BYTES = 256, EAGER_BYTES = 16 << 10, BUFFER_BYTES = 16 << 10, TURN_BYTES = 4 << 20, MOST_AT_ONCE = 1 << 30 };
enum : u32 { DEPTH = 256, BATCH = 32, IDLE_POLLS = 4096, UNANSWERED = 6 };
enum : u64 { PUT = 1, SIGNAL = 2 };

struct Header { u64 kind, offset, word; };  // word: the bytes of a put, which follow; or the value of a signal

struct Request {
  Header header;
  char copied[INLINE_BYTES];
  const char* source;  // null: what is copied, right behind the header
  u64 nbytes;

  u64 total() const { return sizeof header + nbytes; }
};
static_assert(offsetof(Request, copied) == sizeof(Header));

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == ENOMEM; }

void store_words(char* to, const char* from, u64 nbytes) {
  for (u64 i = 0; i < nbytes; i += 8) {
    u64 word;
    memcpy(&word, from + i, 8);
    store_relaxed((u64*)(to + i), word);
  }
}

void place(char* to, const char* from, u64 nbytes) {
  if (nbytes <= SMALL_BYTES && !(((u64)to | nbytes) & 7)) store_words(to, from, nbytes);
  else memcpy(to, from, nbytes);
}

class Stream {
 public:
  Stream(int fd, const cr_regions& regions) : fd_(fd), regions_(regions) {}

  int put(u64 offset, const void* source, u64 nbytes) {
    if (ended_ || deaf_ || !nbytes) return 1;
    if (full()) return 0;
    Request& r = queue_[tail_++ % DEPTH];
    r.header = {PUT, offset, nbytes};
    r.nbytes = nbytes;
    r.source = nbytes > INLINE_BYTES ? (const char*)source : nullptr;
    if (!r.source) memcpy(r.copied, source, nbytes);
    waiting_ += nbytes;
    return 1;
  }

  int signal(u64 offset, u64 value) {
    if (ended_ || deaf_) return 1;
    if (full()) return 0;
    Request& r = queue_[tail_++ % DEPTH];
    r.header = {SIGNAL, offset, value};
    r.nbytes = 0;
    r.source = nullptr;
    if (waiting_ >= EAGER_BYTES) send();
    return 1;
  }

  int flush() {
    if (!ended_) send();
    return ended_ || head_ == tail_;
  }

  int poll() {
    if (ended_) return -1;
    bool moved = send();
    moved |= receive();
    if (!moved && !ended_ && ++idle_ % IDLE_POLLS == 0) look();
    return moved ? 1 : -(int)ended_;
  }

  bool end() {
    bool before = ended_;
    ended_ = true;
    return before;
  }
  const char* fault() const { return fault_; }

 private:
  bool full() { return tail_ - head_ == DEPTH && (send(), tail_ - head_ == DEPTH); }

  bool send();
  u32 gather(iovec* parts, u64& total) const;
  void retire(u64 nbytes);
  bool receive();
  void parse();
  bool begin_message(const Header&, char*& to);
  void look();
  void lose(int error);
  void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));

  int fd_;
  const cr_regions& regions_;
  int error_ = 0;                // of sending
  bool ended_ = false, deaf_ = false;  // deaf: the peer takes nothing any more; what it had sent may still be to come
  u32 head_ = 0, tail_ = 0, idle_ = 0;
  u64 sent_ = 0, waiting_ = 0;  // bytes of the head that have left; of puts that have not
  char* to_ = nullptr;          // where the rest of a put goes,
  u64 left_ = 0, have_ = 0;     // its bytes; and those in the buffer
  char fault_[200] = "";
  Request queue_[DEPTH];
  char buffer_[BUFFER_BYTES];
};

// Up to BATCH requests, the first of which may be half sent.
u32 Stream::gather(iovec* parts, u64& total) const {
  u32 n = 0;
  u64 skip = sent_;
  auto add = [&](const char* from, u64 nbytes) {
    u64 behind = skip < nbytes ? skip : nbytes;
    skip -= behind;
    if (behind == nbytes) return;
    parts[n++] = {(void*)(from + behind), nbytes - behind < MOST_AT_ONCE ? nbytes - behind : MOST_AT_ONCE};
    total += parts[n - 1].iov_len;
  };
  for (u32 k = head_; k != tail_ && k - head_ < BATCH && total < MOST_AT_ONCE; k++) {
    const Request& r = queue_[k % DEPTH];
    add((const char*)&r.header, sizeof r.header + (r.source ? 0 : r.nbytes));
    if (r.source) add(r.source, r.nbytes);
  }
  return n;
}

void Stream::retire(u64 nbytes) {
  sent_ += nbytes;
  for (; head_ != tail_ && sent_ >= queue_[head_ % DEPTH].total(); head_++) {
    sent_ -= queue_[head_ % DEPTH].total();
    waiting_ -= queue_[head_ % DEPTH].nbytes;
  }
}

bool Stream::send() {
  bool moved = false;
  while (head_ != tail_) {
    iovec parts[2 * BATCH];
    u64 total = 0;
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = gather(parts, total);
    ssize_t left = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (left < 0 && errno == EINTR) continue;
    if (left < 0 && would_block(errno)) return moved;
    if (left < 0) {
      error_ = errno;
      deaf_ = true;
      head_ = tail_;
      return moved;
    }
    moved = true;
    retire((u64)left);
    if ((u64)left < total) return moved;
  }
  return moved;
}

bool Stream::receive() {
  bool moved = false;
  for (u64 taken = 0; taken < TURN_BYTES && !ended_;) {
    iovec parts[2] = {{to_, left_}, {buffer_ + have_, BUFFER_BYTES - have_}};
    msghdr message{};
    message.msg_iov = left_ ? parts : parts + 1;
    message.msg_iovlen = left_ ? 2 : 1;
    ssize_t got = recvmsg(fd_, &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block(errno)) return moved;
    if (got <= 0) return lose(got ? errno : 0), moved;
    u64 asked = left_ + BUFFER_BYTES - have_, direct = left_ < (u64)got ? left_ : (u64)got;
    to_ += direct, left_ -= direct;
    have_ += (u64)got - direct;
    parse();
    moved = true;
    taken += (u64)got;
    if ((u64)got < asked) return moved;
  }
  return moved;
}

bool Stream::begin_message(const Header& h, char*& to) {
  if (h.kind != PUT && h.kind != SIGNAL) return fail("it sent a message of kind %#llx, which there is not", h.kind), false;
  u64 nbytes = h.kind == PUT ? h.word : 8;
  to = regions_.find(h.offset, nbytes);
  if (!to) return fail("it sent %llu bytes to offset %#llx, outside of the registered memory", nbytes, h.offset), false;
  if (h.kind == SIGNAL && (u64)to & 7) return fail("it sent a signal to offset %#llx, which is not aligned", h.offset), false;
  return true;
}

// What is left in the buffer is less than a message, and nothing if a put is under way.
void Stream::parse() {
  const char *at = buffer_, *end = buffer_ + have_;
  while ((u64)(end - at) >= sizeof(Header)) {
    Header h;
    char* to;
    memcpy(&h, at, sizeof h);
    if (!begin_message(h, to)) return;
    u64 behind = (u64)(end - at) - sizeof h;
    if (h.kind == PUT && h.word <= SMALL_BYTES && behind < h.word) break;
    at += sizeof h;
    if (h.kind == SIGNAL) {
      store_release((u64*)to, h.word);
      continue;
    }
    u64 here = h.word < behind ? h.word : behind;
    place(to, at, here);
    at += here;
    to_ = to + here, left_ = h.word - here;
  }
  have_ = (u64)(end - at);
  memmove(buffer_, at, have_);
}

// A peer that is stopped still answers, through its kernel; one that can't be reached does not. What this system could not
// even send counts as probes.
void Stream::look() {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size)) return;
  unsigned tries = info.tcpi_retransmits > info.tcpi_probes ? info.tcpi_retransmits : info.tcpi_probes;
  if (tries >= UNANSWERED) fail("it can't be reached: its system has not answered %u times in a row", tries);
}

// Why reading ended: 0 for an end in order, which may hide why sending ended before.
void Stream::lose(int error) {
  if (!error) error = error_;
  if (error && error != ECONNRESET && error != EPIPE) return fail("%s", strerror(error));
  ended_ = true;
}

void Stream::fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault_, sizeof fault_, format, arguments);
  va_end(arguments);
  ended_ = true;
}

Stream& stream(void* context) { return *(Stream*)context; }
int put(void* c, unsigned long long offset, const void* source, unsigned long long nbytes) {
  return stream(c).put(offset, source, nbytes);
}
int signal(void* c, unsigned long long offset, unsigned long long value) { return stream(c).signal(offset, value); }
int flush(void* c) { return stream(c).flush(); }
int poll(void* c) { return stream(c).poll(); }

struct StreamPort {
  cr_port port;
  Stream stream;
};

}  // namespace

extern "C" {

cr_regions* cr_regions_new(void) { return new (std::nothrow) cr_regions; }
void cr_regions_free(cr_regions* regions) { delete regions; }
int cr_regions_add(cr_regions* regions, void* address, unsigned long long nbytes) {
  u32 n = regions->n.load(std::memory_order_relaxed);
  if (n == cr_regions::MOST || nbytes >> cr_regions::SHIFT) return CR_INVALID;
  regions->all[n].base = (char*)address, regions->all[n].nbytes = nbytes;
  regions->n.store(n + 1, std::memory_order_release);
  return CR_OK;
}

cr_port* cr_stream_new(int fd, const cr_regions* regions) {
  auto* made = new (std::nothrow) StreamPort{{}, {fd, *regions}};
  if (!made) return nullptr;
  made->port = {&made->stream, put, signal, nullptr, flush, poll};
  return &made->port;
}
void cr_stream_free(cr_port* port) { delete (StreamPort*)port; }
int cr_stream_end(cr_port* port) { return stream(port->context).end(); }
const char* cr_stream_fault(const cr_port* port) { return stream(port->context).fault(); }
}
