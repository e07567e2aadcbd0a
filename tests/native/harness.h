// Worlds of ranks that are threads of one process and share one mapping of all memory, as sanitizers want it; plans as
// dump_plans.py wrote them; data whose results are known exactly.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../algorithms/device/platform.h"
#include "../../commrt/_native/api.h"

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      fprintf(stderr, "WRONG %s:%d: %s: ", __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                        \
      fprintf(stderr, "\n");                                               \
      _exit(1);                                                            \
    }                                                                      \
  } while (0)

enum { ALL_REDUCE_, ALL_GATHER_, REDUCE_SCATTER_, BROADCAST_, REDUCE_, GATHER_, SCATTER_, ALL_TO_ALL_, BARRIER_, SEND_ };
enum { SYMMETRIC_NEED = 1, DIRECT_NEED = 2, MAPPED_NEED = 4, SWITCH_NEED = 8 };
enum { UINT8 = 2, INT32 = 5, INT64 = 7, FLOAT32 = 11, FLOAT64 = 12 };

// The same numbers on all ranks for the same seed.
struct Random {
  u64 state;
  u64 next() {
    u64 z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  u64 below(u64 n) { return next() % n; }
};
inline Random random_of(u64 a, u64 b, u64 c = 0) {
  Random r{a * 1000003 + b * 7919 + c * 104729 + 17};
  r.next();
  return r;
}

struct RankPlan {
  cr_plan plan;
  std::vector<cr_op> ops;
  std::vector<cr_ref> refs;
  std::vector<unsigned> peers, begin;
};

struct WholePlan {
  std::string name;
  unsigned collective, ranks, root, needs;
  std::vector<RankPlan> programs;
};

inline u64 number(std::istream& in) {
  long long n = 0;
  CHECK(in >> n, "the plan file ends early");
  return (u64)n;
}

inline RankPlan read_program(std::istream& in) {
  RankPlan p{};
  cr_plan& plan = p.plan;
  unsigned* heads[] = {&plan.nblocks, &plan.nops, &plan.nrefs, &plan.npeers, &plan.parts, &plan.scratch_slots,
                       &plan.packet_slots, &plan.synchronising, &plan.id};
  for (unsigned* head : heads) *head = (unsigned)number(in);
  plan.unit = number(in);
  for (unsigned k = 0; k <= plan.nblocks; k++) p.begin.push_back((unsigned)number(in));
  for (unsigned k = 0; k < plan.nops; k++) {
    unsigned n[12];
    for (unsigned& x : n) x = (unsigned)number(in);
    p.ops.push_back({(u8)n[0], (u8)n[1], (u8)n[2], (u8)n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11]});
  }
  for (unsigned k = 0; k < plan.nrefs; k++) {
    i64 n[4];
    for (i64& x : n) x = (i64)number(in);
    p.refs.push_back({(u8)n[0], (int)n[1], (unsigned)n[2], (unsigned)n[3]});
  }
  for (unsigned k = 0; k < plan.npeers; k++) p.peers.push_back((unsigned)number(in));
  return p;
}

inline std::vector<WholePlan> read_plans(const char* path, unsigned ranks) {
  std::ifstream in(path);
  CHECK(in, "no plans at %s", path);
  std::vector<WholePlan> plans;
  std::string word;
  while (in >> word) {
    WholePlan p;
    in >> p.name >> p.collective >> p.ranks >> p.root >> p.needs;
    for (unsigned rank = 0; rank < p.ranks; rank++) p.programs.push_back(read_program(in));
    if (p.ranks == ranks || (p.collective == SEND_ && ranks >= 2)) plans.push_back(std::move(p));
  }
  CHECK(!plans.empty(), "no plans for %u ranks", ranks);
  return plans;
}

inline cr_program* make_program(cr_lane* lane, const RankPlan& p) {
  cr_plan plan = p.plan;
  plan.ops = p.ops.data(), plan.refs = p.refs.data(), plan.peers = p.peers.data(), plan.begin = p.begin.data();
  cr_program* program = nullptr;
  int code = cr_program_new(lane, &plan, nullptr, &program);
  CHECK(code == CR_OK, "cr_program_new answers %d", code);
  return program;
}

struct Options {
  unsigned ranks;
  u64 scratch_half, packets_half;
  bool memory_file;    // segments are what cr_memory_create makes; else private memory
  bool one_engine;     // for all ranks
  u64 epoch = 0;
  unsigned lap = 6;
  bool streams = false;  // ports over sockets join the ranks, and no mapped memory
};

class Meeting {
 public:
  explicit Meeting(unsigned n) : n_(n) {}
  void wait() {
    std::unique_lock<std::mutex> hold(lock_);
    u64 round = round_;
    if (++here_ == n_) return here_ = 0, round_++, wake_.notify_all();
    wake_.wait(hold, [&] { return round_ != round; });
  }

 private:
  std::mutex lock_;
  std::condition_variable wake_;
  u64 round_ = 0;
  unsigned n_, here_ = 0;
};

struct Rank {
  unsigned rank;
  cr_engine* engine;
  cr_comm* comm;
  char* segment;
  std::vector<char> arena;   // symmetric memory
};

// Two ranks' ends of one connection, each behind a lock as in the package. Small buffers: messages come in pieces.
class StreamPair {
 public:
  StreamPair(char* one, char* other, u64 nbytes) {
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, fds_), "no sockets");
    char* segments[] = {one, other};
    for (int k = 0; k < 2; k++) {
      int small = 32 << 10;
      setsockopt(fds_[k], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
      regions_[k] = cr_regions_new();
      CHECK(!cr_regions_add(regions_[k], segments[k], nbytes), "a segment can't be registered");
      ports_[k] = cr_stream_new(fds_[k], regions_[k]);
      locked_[k] = cr_port_locked(ports_[k]);
    }
  }
  ~StreamPair() {
    for (int k = 0; k < 2; k++) {
      CHECK(!*cr_stream_fault(ports_[k]), "a link failed: %s", cr_stream_fault(ports_[k]));
      cr_port_locked_free(locked_[k]);
      cr_stream_free(ports_[k]);
      cr_regions_free(regions_[k]);
      close(fds_[k]);
    }
  }
  void connect(cr_comm* one, unsigned rank, cr_comm* other, unsigned peer) {
    CHECK(!cr_comm_connect(one, peer, nullptr, locked_[0], nullptr, -1), "connecting fails");
    CHECK(!cr_comm_connect(other, rank, nullptr, locked_[1], nullptr, -1), "connecting fails");
  }

 private:
  int fds_[2];
  cr_regions* regions_[2];
  cr_port *ports_[2], *locked_[2];
};

// All that is shared between ranks is set up before a rank runs, and torn down after the last.
class World {
 public:
  enum : u64 { ARENA = 4 << 20 };

  explicit World(const Options& o) : options(o), ranks(o.ranks), meeting(o.ranks) {
    cr_shape shape{o.ranks, o.scratch_half, o.packets_half, 8192, 8192};
    nbytes_ = cr_segment_bytes(&shape);
    for (unsigned r = 0; r < o.ranks; r++) {
      Rank& rank = ranks[r];
      rank.rank = r;
      rank.engine = r && o.one_engine ? ranks[0].engine : cr_engine_new();
      rank.segment = segment();
      rank.arena.resize(ARENA);
      cr_config config{shape, r, rank.segment, o.epoch, o.lap, 1};
      rank.comm = cr_comm_new(rank.engine, &config, nullptr);
      CHECK(rank.comm, "cr_comm_new refuses rank %u", r);
    }
    cr_port direct;
    cr_port_same_process(&direct);
    for (Rank& rank : ranks)
      for (Rank& peer : ranks) {
        bool apart = o.streams && rank.rank != peer.rank;
        if (apart && rank.rank < peer.rank) streams_.push_back(std::make_unique<StreamPair>(rank.segment, peer.segment, nbytes_));
        if (apart && rank.rank < peer.rank) streams_.back()->connect(rank.comm, rank.rank, peer.comm, peer.rank);
        int code = apart ? CR_OK : cr_comm_connect(rank.comm, peer.rank, peer.segment, nullptr, &direct, -1);
        CHECK(!code && !cr_comm_window(rank.comm, peer.rank, 0, (u64)peer.arena.data(), ARENA), "connecting answers %d", code);
      }
  }

  ~World() {
    for (Rank& rank : ranks) cr_comm_free(rank.comm);
    for (Rank& rank : ranks)
      if (!rank.rank || !options.one_engine) cr_engine_free(rank.engine);
    for (Rank& rank : ranks) munmap(rank.segment, nbytes_);
  }

  // body on every rank at once, each in a thread of its own.
  void run(const std::function<void(Rank&)>& body) {
    std::vector<std::thread> threads;
    for (Rank& rank : ranks) threads.emplace_back([&] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  Options options;
  std::vector<Rank> ranks;
  Meeting meeting;

 private:
  char* segment() const {
    void* at = nullptr;
    int fd = -1;
    if (options.memory_file) {
      int error = cr_memory_create(nbytes_, &fd, &at);
      CHECK(!error && !cr_memory_lock(fd), "cr_memory_create answers %d", error);
      close(fd);
    } else at = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "no memory for a segment");
    return (char*)at;
  }

  u64 nbytes_;
  std::vector<std::unique_ptr<StreamPair>> streams_;
};

// ---- data ------------------------------------------------------------------------------------------------------------

struct Step {
  unsigned collective, root, dtype, reduction, ranks;
  u64 count, salt;
  bool in_place, symmetric;
};

inline unsigned itemsize(unsigned dtype) { return cr_itemsize(dtype); }
inline u64 groups_in(const Step& s) {
  return s.collective == REDUCE_SCATTER_ || s.collective == SCATTER_ || s.collective == ALL_TO_ALL_ ? s.ranks : 1;
}
inline u64 groups_out(const Step& s) {
  return s.collective == ALL_GATHER_ || s.collective == GATHER_ || s.collective == ALL_TO_ALL_ ? s.ranks : 1;
}
// Small integers: exact in every type, whatever the order they are folded in.
inline i64 element(const Step& s, unsigned rank, u64 index) { return (i64)((index * 7 + rank * 3 + s.salt) % 5); }

inline bool rooted(unsigned collective) { return collective >= BROADCAST_ && collective <= SCATTER_; }
inline bool has_input(const Step& s, unsigned rank) {
  if (s.collective == BARRIER_ || (s.collective == SEND_ && rank)) return false;
  return s.collective != SCATTER_ || rank == s.root;
}
inline bool has_output(const Step& s, unsigned rank) {
  if (s.collective == BARRIER_) return false;
  if (s.collective == SEND_) return rank == 1;
  return (s.collective != REDUCE_ && s.collective != GATHER_) || rank == s.root;
}

template <class T> T folded(const Step& s, u64 index) {
  T acc = (T)element(s, 0, index);
  for (unsigned q = 1; q < s.ranks; q++) {
    T x = (T)element(s, q, index);
    if (s.reduction == 1) acc = (T)(acc * x);
    else if (s.reduction == 2) acc = x < acc ? x : acc;
    else if (s.reduction == 3) acc = x > acc ? x : acc;
    else acc = (T)(acc + x);
  }
  return s.reduction == 4 ? (T)(acc / (T)s.ranks) : acc;
}

template <class T> T expected(const Step& s, unsigned rank, u64 group, u64 k) {
  u64 own = rank * s.count + k;
  switch (s.collective) {
    case ALL_REDUCE_: case REDUCE_: return folded<T>(s, k);
    case REDUCE_SCATTER_: return folded<T>(s, own);
    case ALL_GATHER_: case GATHER_: return (T)element(s, (unsigned)group, k);
    case ALL_TO_ALL_: return (T)element(s, (unsigned)group, own);
    case SCATTER_: return (T)element(s, s.root, own);
    case SEND_: return (T)element(s, 0, k);
    default: return (T)element(s, s.root, k);
  }
}

// A rank's buffers for one operation: in its symmetric memory, or apart at any alignment.
class Buffers {
 public:
  Buffers(const Step& s, Rank& rank, unsigned place, u64 offset) : s_(s), place_(place) {
    u64 item = itemsize(s.dtype);
    in_bytes_ = groups_in(s) * s.count * item, out_bytes_ = groups_out(s) * s.count * item;
    u64 room = in_bytes_ + out_bytes_ + 256;
    char* base = rank.arena.data() + offset;
    if (!s.symmetric) own_.resize(room + 64), base = own_.data() + offset % 64;
    CHECK(!s.symmetric || offset + room <= World::ARENA, "the arena is too small");
    input = has_input(s, place) ? base : nullptr;
    output = has_output(s, place) ? base + in_bytes_ + 128 : nullptr;
    if (s.in_place && input && output) alias();
    if (output) memset(output, 77, out_bytes_);
    if (input) fill();
  }
  cr_call call(cr_program* program) const {
    return {program, s_.collective, s_.dtype, s_.reduction, s_.root, input, output, s_.count};
  }
  void check(const char* name) const {
    if (s_.dtype == UINT8) typed<u8>(name);
    else if (s_.dtype == INT32) typed<i32>(name);
    else if (s_.dtype == INT64) typed<i64>(name);
    else if (s_.dtype == FLOAT32) typed<float>(name);
    else typed<double>(name);
  }

  char *input, *output;

 private:
  void alias() {
    u64 own = place_ * s_.count * itemsize(s_.dtype);
    if (s_.collective == ALL_GATHER_ || s_.collective == GATHER_) input = output + own;
    else if (s_.collective == REDUCE_SCATTER_ || s_.collective == SCATTER_) output = input + own, out_bytes_ = 0;
    else if (s_.collective != ALL_TO_ALL_) output = input;
  }
  template <class T> void store(char* at, u64 index, i64 value) const {
    T x = (T)value;
    memcpy(at + index * sizeof(T), &x, sizeof(T));
  }
  void fill() {
    for (u64 i = 0; i < groups_in(s_) * s_.count; i++) {
      i64 x = element(s_, place_, i);
      if (s_.dtype == UINT8) store<u8>(input, i, x);
      else if (s_.dtype == INT32) store<i32>(input, i, x);
      else if (s_.dtype == INT64) store<i64>(input, i, x);
      else if (s_.dtype == FLOAT32) store<float>(input, i, x);
      else store<double>(input, i, x);
    }
  }
  template <class T> static T load(const char* at, u64 index) {
    T x;
    memcpy(&x, at + index * sizeof(T), sizeof(T));
    return x;
  }
  template <class T> void typed(const char* name) const {
    for (u64 g = 0; output && g < groups_out(s_); g++)
      for (u64 k = 0; k < s_.count; k++) {
        T got = load<T>(output, g * s_.count + k), want = expected<T>(s_, place_, g, k);
        CHECK(got == want, "%s, rank %u, group %llu, element %llu of %llu, salt %llu: %g, not %g", name, place_, g, k, s_.count,
              s_.salt, (double)got, (double)want);
      }
    if (s_.in_place || !input) return;
    for (u64 i = 0; i < groups_in(s_) * s_.count; i++)
      CHECK(load<T>(input, i) == (T)element(s_, place_, i), "%s: the input of rank %u was written to at %llu", name, place_, i);
  }

  Step s_;
  unsigned place_;
  u64 in_bytes_, out_bytes_;
  std::vector<char> own_;
};

// What to do as step `index` of a run; the same on all ranks.
inline Step random_step(const WholePlan& p, Random& random, u64 most_bytes) {
  static const unsigned dtypes[] = {UINT8, INT32, INT64, FLOAT32, FLOAT64};
  Step s{};
  s.collective = p.collective, s.root = p.root, s.ranks = p.ranks;
  s.dtype = dtypes[random.below(5)];
  s.reduction = (unsigned)random.below(5);
  s.salt = random.below(1000);
  u64 most = most_bytes / itemsize(s.dtype) / (groups_in(s) * groups_out(s));
  u64 small[] = {0, 1, s.ranks - 1, s.ranks + 1, random.below(100), random.below(2000)};
  s.count = random.below(3) ? small[random.below(6)] : random.below(most);
  if (p.collective == BARRIER_) s.count = 0;
  s.in_place = random.below(2) && p.collective != ALL_TO_ALL_ && p.collective != SEND_;
  s.symmetric = p.needs & SYMMETRIC_NEED || (p.needs & DIRECT_NEED && random.below(2)) || !random.below(4);
  if (p.collective == BARRIER_) s.symmetric = false;
  return s;
}

// Where in its symmetric memory a rank keeps what is in flight: regions for those that may be at once, all places random.
inline u64 place_in(unsigned region, unsigned regions, Random& random) {
  return region * (World::ARENA / regions) + random.below(2048);
}

inline void dawdle(Random& random) {
  u64 how = random.below(12);
  if (how == 0) usleep((unsigned)random.below(1500));
  else if (how < 4) std::this_thread::yield();
}
