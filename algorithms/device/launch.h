// What a launch of a plan is made of. Plain data, shared by the host and every device; sizes and offsets are 64-bit.
#pragma once
#include "platform.h"

namespace commrt {

enum Code : u8 {
  COPY, PUT, GET, REDUCE, SIGNAL, WAIT, PUT_PACKETS, UNPACK_PACKETS, REDUCE_PACKETS, SWITCH_REDUCE, SWITCH_BROADCAST,
  BARRIER, SYNC, LOOP
};
enum Buffer : u8 { INPUT, OUTPUT, SCRATCH, PACKETS, HOST };  // the last: own scratch that peers of other devices reach
enum Flags : u8 { FINAL = 1, PUBLISH = 2, SLICED = 4, SHARED = 8 };
enum : i32 { SELF = -1 };
enum Distance : u32 { NEAR, DOUBTFUL, FAR };
enum : u32 { UNKNOWN = ~0u };
enum { HISTORY = 4, MAX_REFS = 256, MAX_PACKET_SOURCES = 64, MAX_BLOCKS = 16, MAX_CHANNELS = 8, LINE = 128 };

// The one word a peer writes to signal, and what it says with it. In the reader's memory; one writer.
struct alignas(LINE) Line {
  u64 value;          // absolute count of signals, so that a replay is harmless
  u64 tag;            // fingerprint of the writer's operation
  u64 input, output;  // addresses of the writer's user buffers, where the plan publishes them
};

// What a rank shows to its peers about one lane. One writer. No peer is so far ahead that it needs more of the history.
struct alignas(LINE) Control {
  u64 entered;        // epoch of the window under way: all earlier ones are over, their scratch may be reused
  u64 sequence;       // operation under way
  u64 completed;      // last operation that ended well
  u64 state;          // of the communicator: 0 open, or the code that it was closed or broken with
  u64 tags[HISTORY];  // fingerprints of the last operations, by sequence
  u64 what[HISTORY];  // collective | dtype << 8 | reduction << 16 | memory class << 24 | algorithm << 32
  u64 count[HISTORY], root[HISTORY];
  u64 beat;           // grows while the rank waits
};

// Why a rank's communicator broke. Written before its state.
struct alignas(LINE) Verdict {
  u64 sequence;            // of the operation that failed
  u64 finder, culprit;     // ranks; the culprit may be unknown
  u64 mine[4], theirs[4];  // tag, what, count and root of the finder's and of the culprit's operation
};

// A link that takes requests. Each call answers 1 (taken, or done), 0 (not yet: try again) or a negative error.
struct Port {
  void* context;
  int (*put)(void* context, u64 remote_offset, const void* source, u64 nbytes);
  int (*signal)(void* context, u64 remote_offset, u64 value);            // seen after every put before it
  int (*get)(void* context, void* destination, u64 remote_address, u64 nbytes);
  int (*flush)(void* context);                                           // all sources may be reused
  int (*poll)(void* context);                                            // 1: something moved
};

struct Peer {
  Line* out;            // this rank's lines in the peer's memory (mapped), [channel * 2 + parity]
  const Line* in;       // the peer's lines in this rank's memory
  char *scratch, *packets;
  const Control* view;  // the peer's control block, or the mirror of it that a port fills
  const Port* port;     // for what is not mapped
  const Port* direct;   // reads the peer's ordinary memory
  u64 out_at, scratch_at, mirror_at;  // offsets in the peer's segment, for the port
  u64 posted[MAX_CHANNELS], expected[MAX_CHANNELS];
  u64 input, output;    // learnt from the peer's signal in this launch
};

struct Ref { u8 buffer; i32 rank; u32 index, part; };

struct Op {
  u8 code, flags, channel, size_buffer;
  u32 ndst, nsrc, ref;   // refs[ref...]: destinations, then sources
  u32 peer, npeers;      // peers[peer...]
  u32 size_index, size_part;
  u32 target;
};

struct Program {         // one rank's slice of a plan
  const Op* ops;
  const Ref* refs;
  const u32* peers;
  const u32* begin;      // of each block in ops; begin[nblocks] is the end
  u32 nblocks, parts, scratch_slots, packet_slots;
  u64 unit, most_part;   // bytes of a slice; most bytes of a part, so that all slots fit
  u32 synchronising, id;
  const u8* writes;      // [ranks]: whether it puts into that rank's memory
};

struct Lane {            // an ordered sequence of launches, and its memory
  u64 epoch;             // of the last window that is over
  u64 synced;            // last epoch that every peer is known to have entered
  u64 lap;               // flags run 1..lap
  u32 flag;              // of the same window
  u32 rank, ranks;
  char *scratch, *packets, *host;       // first halves; the last: scratch in host memory, on a CPU the same
  char* multicast;                      // all ranks' scratch at once, through a switch; null where there is none
  u64 scratch_half, packets_half;       // bytes
  Control* control;
  Peer* peers;                          // [ranks]; peers[rank] is this rank itself
  u64 arrived;                          // blocks at the barrier
  u64* abort;                           // polled by whoever waits
  u64 failure;                          // what a kernel met: culprit << 32 | Failure
  u32 copies, far;                      // host: copies to where peers read; how far their caches are
};

struct Windows { const u64 *base, *size; u32 n; };   // one rank's symmetric segments, mapped here

typedef void (*Reduce)(char* const* dsts, u32 ndst, const char* const* srcs, u32 nsrc, u64 count, u32 divisor);

struct Launch {
  const Program* program;
  Lane* lane;
  char *input, *output;
  u64 count;             // elements of a group
  u64 tag, what, root;   // shown in the control block
  u32 shift;             // log2 of the element's bytes
  u32 divisor;           // for avg; else 0
  Reduce reduce;         // CPU; on a GPU the kernel is compiled for the pair
  u64 published_input, published_output;  // how peers name this rank's buffers
  const Windows* windows;                 // [ranks], or null: peers' user buffers are read through `direct`
  u64 epoch;                              // the window: its number and its packets' flag,
  u32 flag;
  u64 first, width, part;                 // its first element, elements, elements of a part
  u64 input_bytes, output_bytes;
  u64 window;                             // most elements of a window
  u64* done;                              // set to 1 once a kernel has ended well; or null
  u64 scratch_slot, packet_slot;          // bytes
};

struct Block {           // a cursor: where a thread block stands. Plain data, for debugger and flight recorder.
  u32 id, pc, end, budget;
  u64 turn, at;          // turn of the loop; progress inside the operation
  u64 barriers;
  u32 half;              // 1 + the rank whose signal is half sent on a port
  u32 failure, culprit;  // an error that an operation met, and by whom
  u32 votes;             // of a block of many threads, whether to go on
};

enum Failure : u32 { NONE, MISMATCH, TRANSPORT, BOUNDS };

}  // namespace commrt
