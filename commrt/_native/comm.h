// Communicators, their lanes, and the launches that wait in them.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "../../algorithms/device/host_math.h"
#include "../../algorithms/device/executor.h"
#include "layout.h"

namespace commrt {

enum Collective : u32 {
  ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE_TO, GATHER, SCATTER, ALL_TO_ALL, BARRIER_OF, SEND_TO, COLLECTIVES
};

// A short critical section between threads of one process.
class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) sched_yield_once();
  }
  bool try_lock() { return !flag_.test_and_set(std::memory_order_acquire); }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  static void sched_yield_once();
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

struct StoredProgram {
  Program program;
  std::vector<Op> ops;
  std::vector<Ref> refs;
  std::vector<u32> peers, begin;
};

struct Route { u64 most_bytes; const Program* program; };
typedef std::vector<Route> Routes;

}  // namespace commrt

struct cr_program : commrt::StoredProgram {};

// One operation: queued in its lane, run by whoever drives the engine, looked at by the holder of its handle.
struct cr_launch {
  commrt::Launch launch;
  commrt::Block blocks[commrt::MAX_BLOCKS];
  bool done[commrt::MAX_BLOCKS];
  u32 live;
  enum Phase { WAITING, ANNOUNCING, GUARDED, RUNNING, FLUSHING } phase;
  u64 sequence, announced;
  i64 timeout_ns, deadline_ns;  // deadline: set when first looked at; 0 before
  bool lost_once;
  cr_engine* engine;        // outlives the lane
  cr_lane* lane;
  cr_launch* next;
  std::atomic<int> state;   // CR_PENDING, CR_OK, or why it failed
  std::atomic<int> owners;  // the lane and the handle
};

struct cr_lane {
  commrt::Lane lane;
  cr_comm* comm;
  commrt::LaneKind kind;
  u32 peer;                    // of a point-to-point lane
  std::vector<u32> members;    // ranks of the communicator, by rank in the lane
  std::vector<commrt::Peer> peers;
  std::vector<commrt::Windows> windows;  // of the members' symmetric memory
  u64 sequence;                // operations begun
  cr_launch *head, *tail;              // guarded by the engine's gate
  bool has_ports;
  std::vector<std::unique_ptr<cr_program>> programs;          // guarded by the engine's gate, as are the rows
  std::vector<std::unique_ptr<commrt::Routes>> rows;
  std::vector<std::atomic<const commrt::Routes*>> routes;     // by row()

  u64 row(u32 collective, u32 symmetric, u32 root) const {
    return (collective * 2ull + symmetric) * lane.ranks + root;
  }
  void keep(std::unique_ptr<cr_program>);
  void keep(u64 row, std::unique_ptr<commrt::Routes>);
};

// Communicators of one process that are each other's only peers: if no cursor of theirs can move, none ever will.
struct cr_group {
  u32 ranks;
  std::vector<cr_failure> stuck;
  u32 found;
};

struct cr_comm {
  cr_comm(cr_engine*, const cr_config&, cr_group*);

  cr_engine* engine;
  cr_group* group;
  cr_config config;
  commrt::Layout layout;
  u64 abort;                     // polled by kernels
  std::atomic<int> state;                // CR_OK, or what broke it
  cr_failure failure;
  std::vector<char*> segments;           // by rank, as mapped here; null where only a port leads
  std::vector<commrt::Port> ports, directs;
  std::vector<int> life;
  std::vector<char> dead;
  std::vector<std::vector<u64>> window_base, window_size;
  std::vector<commrt::Windows> windows;  // views of the two above
  cr_lane collectives;
  std::mutex pairs_lock;                        // held while lanes are made
  std::vector<std::unique_ptr<cr_lane>> pairs;  // [peer * 2 + send]
  i64 lives_ns;                  // when peers were last seen alive
  bool has_ports;
  double timeout_s = -1, slice_s = -1;   // of calls that don't say

  commrt::Control* control(commrt::LaneKind kind, u32 peer) const {
    return (commrt::Control*)(config.segment + layout.control(kind, peer));
  }
  commrt::Doorbell* doorbell(u32 rank) const {
    return segments[rank] ? (commrt::Doorbell*)(segments[rank] + layout.doorbell) : nullptr;
  }
  const commrt::Control* view(u32 rank) const { return collectives.peers[rank].view; }
  cr_lane* pair(u32 peer, bool send);
  void show_windows(u32 rank, commrt::Windows);  // to every lane
  void init_lane(cr_lane&, commrt::LaneKind, u32 peer);
  void connect_lane(cr_lane&, u32 rank_in_lane);
  bool poll_ports();
  bool push_controls();
  bool complaint(cr_failure&) const;  // a peer is broken by what this rank sent it
  void publish_state(int code, u64 sequence, u32 culprit);
};

namespace commrt {

// The life of a launch, step by step; each is called by the driver of the engine alone.
bool advance(cr_launch&, bool alone, bool& finished);  // true: something moved
void explain(const cr_launch&, cr_failure&);           // where it stands
int check(cr_launch&, i64 now_ns, cr_failure&);        // CR_OK, or why it can't end well
void describe(const cr_launch&, u32 peer_in_lane, cr_failure&);  // what that peer says it is doing
void blame(const cr_launch&, cr_failure&);
u32 log2_itemsize(u32 dtype);
u64 route_groups(u32 collective, u32 ranks);
void input_output_groups(u32 collective, u32 ranks, u64& in, u64& out);
bool prepare(cr_lane&, const cr_call&, cr_launch&, int& code);
int validate(const cr_plan&, u32 rank, u32 ranks);
i64 now_ns();

}  // namespace commrt
