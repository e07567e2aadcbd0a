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

struct Route { u64 most_bytes; const cr_program* program; };
typedef std::vector<Route> Routes;

}  // namespace commrt

// A program lies in one block of memory, which kernels of a device may read where it stands.
struct cr_program {
  std::unique_ptr<char[]> own;  // the block, unless it was handed in
  commrt::Program* program;
  bool carried;
};

// One operation: queued in its lane, run by whoever drives the engine, looked at by the holder of its handle.
struct cr_launch {
  commrt::Launch launch;
  commrt::Block blocks[commrt::MAX_BLOCKS];
  bool done[commrt::MAX_BLOCKS];
  u32 live;
  enum Phase { WAITING, ANNOUNCING, GUARDED, RUNNING, CARRIED, FLUSHING, DOUBTED } phase;
  enum : int { APART = -2, AGREED = -1 };
  bool carried;
  std::atomic<int> carriage;           // of a carried one: APART, AGREED, then how it was carried
  u64 sequence, announced;
  i64 timeout_ns, looked_ns, lost_ns;  // when it was first looked at, and first seen to be lost; 0 before
  u32 bad_link;                        // a peer whose port refused; UNKNOWN: none
  cr_engine* engine;        // outlives the lane
  cr_lane* lane;
  cr_launch* next;
  std::atomic<int> state;   // CR_PENDING, CR_OK, or why it failed
  std::atomic<int> owners;  // the lane, and the holders of the handle
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
  u64 matched;                 // all up to this one are known to have been called alike by every member
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
  std::vector<cr_comm*> members;  // by rank; null: not made yet, or closed
  std::vector<cr_place> stuck;    // of a deadlock
};

// A device's launch as the host last saw it.
struct cr_watched { u64 sequence; i64 looked_ns, lost_ns, failed_ns; };

struct cr_comm {
  cr_comm(cr_engine*, const cr_config&, cr_group*);

  cr_engine* engine;
  cr_group* group;
  cr_config config;
  commrt::Layout layout;
  u64 abort;                     // polled by kernels
  std::atomic<int> state;                // CR_OK, or what broke it
  std::atomic<u32> aborting;             // threads inside of abort
  cr_failure failure;                    // guarded by the engine's gate, as is the next
  std::vector<cr_standing> standing;
  std::vector<char*> segments;           // by rank, as mapped here; null where only a port leads
  std::vector<commrt::Port> ports, directs;
  std::vector<int> life;
  std::vector<char> dead;
  std::vector<std::vector<u64>> window_base, window_size;
  std::vector<commrt::Windows> windows;  // views of the two above
  cr_lane collectives;
  std::mutex pairs_lock;                        // held while lanes are made
  std::vector<std::unique_ptr<cr_lane>> pairs;  // [peer * 2 + send]
  i64 scanned_ns;                // when the peers were last looked at: life, and what they have shown of late
  std::vector<u64> beats;
  std::vector<i64> beat_ns;
  bool has_ports;
  commrt::Lane* device = nullptr;        // the lane of collectives as kernels see it, where they run on a device
  cr_watched watched{};
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
  bool flush_ports();  // true: what they had taken has left
  const commrt::Verdict* verdict(u32 rank) const;
  void scan(i64 now);                       // of the peers; often asked, seldom done
  void adopt(u32 rank, cr_failure&) const;  // what broke that rank
  bool complaint(cr_failure&) const;        // a peer found that ranks disagree
  void publish(const cr_failure&);
  bool agreed(cr_failure&, cr_lane*& where, bool& pending);  // on all that was called so far; for close
};

namespace commrt {

// The life of a launch, step by step; each is called by the driver of the engine alone.
bool advance(cr_launch&, bool alone, bool& finished);  // true: something moved
void explain(const cr_launch&, cr_failure&);           // where it stands
int check(cr_launch&, i64 now_ns, cr_failure&);        // CR_OK, or why it can't end well
int show_calls(const Port&, const Control&, u64 mirror_at);      // a port's answer
int show_sequence(const Port&, const Control&, u64 mirror_at);   // behind that: the rest is whole
bool blame(const cr_launch&, cr_failure&);             // finds who called something else
void places(const cr_launch&, std::vector<cr_place>&); // of all blocks that can't go on
void stand(const cr_lane&, i64 looked_ns, std::vector<cr_standing>&, i64 now_ns);
bool match(cr_lane&, u64 upto);                        // true: all members have called the same up to there
bool differs(const cr_lane&, u32 peer_in_lane, u64 sequence);
void dispute(const cr_lane&, u32 peer_in_lane, u64 sequence, cr_failure&);  // both sides of it
inline bool broken(u64 state) { return state >= CR_MISMATCH && state != CR_CLOSED; }
u32 log2_itemsize(u32 dtype);
u64 nbytes_of(const unsigned long long call[4]);       // tag, what, count, root
u64 route_groups(u32 collective, u32 ranks);
void input_output_groups(u32 collective, u32 ranks, u64& in, u64& out);
bool prepare(cr_lane&, const cr_call&, cr_launch&, int& code);
int validate(const cr_plan&, u32 rank, u32 ranks);
i64 now_ns();

}  // namespace commrt
