// The C interface of the native core: what Python sees through cffi, and what a C library can call without Python.
// Functions that return int answer CR_OK or one of the codes below; none throws.
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
// CDEF BEGIN
enum cr_code {
  CR_OK = 0, CR_PENDING = 1, CR_NEED_PLAN = 2, CR_NO_MEMORY = 3, CR_INVALID = 4, CR_UNFIT = 5,
  CR_ELSEWHERE = 6,  // another provider carries calls of this size
  CR_MISMATCH = 10, CR_PEER_LOST = 11, CR_TIMEOUT = 12, CR_ABORTED = 13, CR_DEADLOCK = 14, CR_TRANSPORT = 15,
  CR_BOUNDS = 16, CR_CLOSED = 17,
  CR_CARRIER = 18    // another provider failed to carry it
};

typedef struct cr_engine cr_engine;
typedef struct cr_comm cr_comm;
typedef struct cr_lane cr_lane;
typedef struct cr_launch cr_launch;
typedef struct cr_program cr_program;
typedef struct cr_group cr_group;
typedef struct cr_regions cr_regions;

typedef struct {
  unsigned char code, flags, channel, size_buffer;
  unsigned int ndst, nsrc, ref, peer, npeers, size_index, size_part, target;
} cr_op;
typedef struct { unsigned char buffer; int rank; unsigned int index, part; } cr_ref;

typedef struct {
  const cr_op* ops; unsigned int nops;
  const cr_ref* refs; unsigned int nrefs;
  const unsigned int* peers; unsigned int npeers;
  const unsigned int* begin; unsigned int nblocks;
  unsigned int parts, scratch_slots, packet_slots, synchronising, id;
  unsigned long long unit;
  unsigned int carried;        // the plan only settles that all ranks call the same; another library moves the data
} cr_plan;

// Sizes of a rank's segment, the same on all ranks of a communicator.
typedef struct {
  unsigned int ranks;
  unsigned long long scratch_half, packets_half;           // of the collective lane
  unsigned long long pair_scratch_half, pair_packets_half; // of each point-to-point lane
} cr_shape;
unsigned long long cr_segment_bytes(const cr_shape*);

typedef struct {
  void* context;
  int (*put)(void*, unsigned long long, const void*, unsigned long long);
  int (*signal)(void*, unsigned long long, unsigned long long);
  int (*get)(void*, void*, unsigned long long, unsigned long long);
  int (*flush)(void*);
  int (*poll)(void*);
} cr_port;

typedef struct {
  cr_shape shape;
  unsigned int rank;
  char* segment;               // this rank's, zeroed, page-aligned; outlives the communicator
  unsigned long long epoch;    // of the first window, minus one
  unsigned int lap;            // packet flags run 1..lap; even
  unsigned int oversubscribed; // more local ranks than cpus
} cr_config;

// One rank's error. `mine` is what rank `finder` called as operation `sequence`, `theirs` what rank `peer` did: tag, what,
// count, root. A tag of 0: not known.
typedef struct {
  unsigned int code, peer, finder, block, operation, op_code, channel, waits_for;
  unsigned long long sequence, nbytes;
  unsigned long long mine[4], theirs[4];
} cr_failure;

// How a rank stood when an operation failed here: operations begun and ended in that lane, the code that its communicator
// was closed or broken with, whether its process is gone, and for how long it has given no sign of life.
typedef struct {
  unsigned long long sequence, completed;
  unsigned int member, state, dead;
  double silent_s;
} cr_standing;

// A thread block that can't go on.
typedef struct { unsigned int rank, block, operation, op_code, channel, waits_for; } cr_place;

unsigned int cr_itemsize(unsigned int dtype);  // bytes; 0: no such type
int cr_can_reduce(unsigned int dtype, unsigned int reduction);

cr_engine* cr_engine_new(void);
void cr_engine_stop(cr_engine*);  // ends its thread; idempotent
void cr_engine_free(cr_engine*);
cr_group* cr_group_new(unsigned int ranks);   // communicators of one process and engine, each other's only peers
void cr_group_free(cr_group*);
unsigned int cr_group_stuck(cr_group*, cr_place* out, unsigned int most);   // of a deadlock; 0: there was none

cr_comm* cr_comm_new(cr_engine*, const cr_config*, cr_group*);
void cr_comm_free(cr_comm*);
// The peer's segment as mapped here (or null), a port to it (or null), a port that reads its ordinary memory (or null),
// and a descriptor whose lock its process holds while it lives (or -1). Ports are borrowed.
int cr_comm_connect(cr_comm*, unsigned int peer, char* segment, const cr_port* port, const cr_port* direct, int life);
// Symmetric memory: where a rank's segment is mapped here. Size 0: gone. Under no operation in flight.
int cr_comm_window(cr_comm*, unsigned int peer, unsigned int segment, unsigned long long base, unsigned long long size);
void cr_comm_abort(cr_comm*);
int cr_comm_state(cr_comm*);                  // CR_OK, or the code that broke it
void cr_comm_failure(cr_comm*, cr_failure*);
void cr_comm_standing(cr_comm*, cr_standing* out);  // by rank, when it failed
// Lets accepted work finish and the peers begin what this rank has sent them, then leaves. The memory may be freed after.
int cr_comm_close(cr_comm*, double timeout_s);

cr_lane* cr_comm_collectives(cr_comm*);
cr_lane* cr_comm_pair(cr_comm*, unsigned int peer, int send);

unsigned int cr_lane_rank(cr_lane*);            // of this rank in the lane

// `memory`: cr_program_bytes of it, that outlive the lane, for kernels to read the program in; null: made here.
unsigned long long cr_program_bytes(const cr_plan*, unsigned int ranks);
int cr_program_new(cr_lane*, const cr_plan*, void* memory, cr_program** out);
// Routes: which program serves up to so many bytes. `root` beyond 0 only for rooted collectives. Owned by the lane.
int cr_lane_route(cr_lane*, unsigned int collective, unsigned int symmetric, unsigned int root,
                  const unsigned long long* most_bytes, cr_program* const* programs, unsigned int n);

typedef struct {
  cr_program* program;         // null: by route
  unsigned int collective, dtype, reduction, root;
  void *input, *output;        // symmetric memory is known by its address
  unsigned long long count;    // elements of a group
} cr_call;

// Runs an operation to its end. CR_PENDING: not within `slice_s`; *pending is its handle, to wait on and release.
int cr_run(cr_lane*, const cr_call*, double timeout_s, double slice_s, cr_launch** pending);
// What calls on numpy arrays (calls.cpp) go by: deadline and slice of those that don't say, numpy's dtype objects by their
// addresses, and the handle of the calling thread's last call that had not ended after a slice.
void cr_comm_patience(cr_comm*, double timeout_s, double slice_s);
void cr_engine_numpy_type(cr_engine*, unsigned long long descr, unsigned int dtype);
cr_launch* cr_pending(void);
int cr_start(cr_lane*, const cr_call*, double timeout_s, cr_launch** out);
int cr_wait(cr_launch*, double timeout_s);    // CR_PENDING: not within the timeout
int cr_poll(cr_launch*);
void cr_release(cr_launch*);                  // the handle; the launch itself runs on
void cr_retain(cr_launch*);                   // one more holder of the handle
// A launch of a carried program holds its place in the lane until it is said to have been carried.
int cr_agreed(cr_launch*, double timeout_s);  // CR_OK: all ranks are in it, carry it now; CR_PENDING; or what ended it
void cr_carried(cr_launch*, int code);        // CR_OK, or what it failed with
int cr_engine_progress_thread(cr_engine*);    // from now on progress needs no waiter

// For kernels that wait outside of the engine. One step of a wait for a peer: gives way, keeps links going, looks at the
// clock and the peer. CR_OK: go on; else what ended it. *began_ns: 0 before the first step.
const unsigned long long* cr_comm_abort_word(cr_comm*);
int cr_comm_tend(void* comm, unsigned peer, unsigned long long* began_ns, unsigned long long timeout_ns);

// Collectives as kernels on a device. `memory`: cr_device_bytes of it, zeroed, at one address for the host and for kernels.
// The other addresses are those of kernels: of segments in host memory, and of memory of the devices with the same layout
// (0: joined through host memory).
unsigned long long cr_device_bytes(cr_comm*);
unsigned long long cr_device_launch_bytes(void);
void cr_device_open(cr_comm*, void* memory, unsigned long long segment, unsigned long long device);
void cr_device_join(cr_comm*, unsigned int peer, unsigned long long segment, unsigned long long device);
// Where a switch reaches all ranks' device memory at once; 0: nowhere.
void cr_device_switch(cr_comm*, unsigned long long multicast);
// Fills in a launch, cr_device_launch_bytes of memory as above, for a kernel on so many blocks; *done becomes 1 once it has
// ended well. Programs must be in such memory too.
int cr_device_prepare(cr_comm*, const cr_call*, void* launch, unsigned long long* done, unsigned int* blocks);
// A look at what the kernels are doing: CR_OK (nothing), CR_PENDING, or what broke the communicator, now or before.
int cr_device_watch(cr_comm*);

// Ports over this machine's own memory. The context is the peer's process id, by value.
void cr_port_same_process(cr_port*);
void cr_port_process_vm(cr_port*, int pid);
// A port that several threads may use, made of one that takes one at a time. Freed by the caller, after its users.
cr_port* cr_port_locked(const cr_port*);
void cr_port_locked_free(cr_port*);
// A port over memory that is mapped here; its offsets are addresses.
void cr_port_mapped(cr_port*);
// A rank's registered memory in the offsets of ports, as commrt/ports.py has it. Added to by one thread at a time.
cr_regions* cr_regions_new(void);
void cr_regions_free(cr_regions*);
int cr_regions_add(cr_regions*, void* address, unsigned long long nbytes);
// A port over a connected stream socket, both of whose ends are such ports; the peer writes to `regions`. Both are borrowed.
// cr_stream_end: it touches neither any more; answers whether it had ended by itself. The fault, if there is one: why.
cr_port* cr_stream_new(int fd, const cr_regions* regions);
void cr_stream_free(cr_port*);
int cr_stream_end(cr_port*);
const char* cr_stream_fault(const cr_port*);
void cr_store_release(unsigned long long* word, unsigned long long value);  // a signal, for ports written in Python

// Shareable memory, whose pages come when touched: 0 or a negative errno. The lock says that its owner lives.
int cr_memory_create(unsigned long long nbytes, int* fd, void** address);
int cr_memory_open(const char* path, unsigned long long nbytes, unsigned long long inode, int* fd, void** address);
int cr_memory_lock(int fd);
int cr_memory_owner_lives(int fd);            // of a peer's memory
void cr_memory_close(void* address, unsigned long long nbytes, int fd);
// CDEF END
#ifdef __cplusplus
}
#endif
