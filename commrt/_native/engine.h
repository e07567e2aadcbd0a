// The process's progress: whoever waits drives every launch in flight; a thread of its own does where nobody waits.
// One driver at a time holds the claim; queues and the pool are guarded by the gate.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "comm.h"

struct cr_engine {
  ~cr_engine();
  cr_launch* take();                                // from the pool
  void release(cr_launch*);                         // one of its owners lets go
  int submit(cr_lane&, cr_launch*);                 // CR_OK, or CR_CLOSED if the communicator is broken
  int wait(cr_launch*, i64 limit_ns);       // its state; CR_PENDING when the limit passes
  int wait_agreed(cr_launch*, i64 limit_ns);        // CR_OK when it is to be carried, CR_PENDING, or how it ended
  bool drain(cr_comm&, i64 limit_ns);       // true: nothing of it is in flight any more
  int close(cr_comm&, i64 limit_ns);
  void abort(cr_comm&);
  int watch(cr_comm&);                              // of collectives that run on a device
  void nudge_progress();                            // something was submitted that nobody waits for
  void start_thread();
  void stop();                                      // ends the thread
  commrt::SpinLock& gate() { return gate_; }

  enum { TYPES = 19 };
  std::atomic<void*> numpy_types[TYPES] = {};       // numpy's dtype objects, by code

 private:
  struct Running { cr_lane* lane; cr_launch* launch; };

  // Under the claim:
  void adopt();
  bool pass();                                      // every active lane once; true: something moved
  bool run(u32 index, bool alone);
  template <class Stop> void drive(Stop stop, i64 limit_ns);
  template <class Done> void wait_until(Done done, cr_launch*, i64 limit_ns);
  bool sleep();
  void look(i64 now);
  void find_deadlock();
  static bool stuck(const Running&, const cr_group&);
  bool all_stuck(const cr_group&) const;
  void fail(cr_comm&, const cr_launch*, const cr_failure&);
  void end(cr_comm&, const cr_failure&);            // tells the peers, ends what is in flight
  void abandon(cr_comm&, int code);                 // ends all it has in flight
  cr_launch* finish(cr_lane&, cr_launch*, int state);
  bool oversubscribed() const;
  void ring_all();

  bool breaks(cr_comm&, const cr_failure&, const cr_lane*, i64 looked_ns);
  int settle(cr_comm&);
  void seize();
  static bool block_failure(const cr_launch&, cr_failure&);
  static void ring(cr_comm&);
  static void nudge(commrt::Doorbell*);
  void set_bed(commrt::Doorbell*);
  void wake_driver();
  bool busy(cr_comm&);
  void release_claim();
  void wake_waiters();
  void wake_the_ended();
  void background();

  commrt::SpinLock gate_, claim_, bed_lock_;
  commrt::Doorbell* bed_ = nullptr;                 // where the driver sleeps
  std::vector<Running> active_;                     // the driver's
  i64 looked_ns_ = 0;                               // the driver's, as is the next
  u32 yields_ = 200;                                // before it sleeps
  bool ended_ = false;                              // the driver's: waiters may have something to see
  std::vector<cr_lane*> incoming_;
  std::atomic<bool> has_incoming_{false};
  std::vector<std::unique_ptr<cr_launch>> pool_;
  std::vector<cr_launch*> free_;
  std::atomic<u32> in_flight_{0}, waiting_{0}, turn_{0}, wanted_{0};  // the last: threads that want the claim for a moment
  std::atomic<bool> stop_{false};
  std::thread thread_;
  std::mutex thread_lock_;
  std::condition_variable thread_wake_;
};
