// Plans as they come in: checked once more here, since an address computed from them is never checked again.
#include <string.h>

#include <algorithm>

#include "comm.h"
#include "reduce.h"

namespace commrt {
namespace {

bool reduces(u32 collective) { return collective == ALL_REDUCE || collective == REDUCE_SCATTER || collective == REDUCE_TO; }

bool is_scratch(u32 buffer) { return buffer == SCRATCH || buffer == HOST; }

bool good_ref(const cr_plan& p, const cr_ref& ref, u32 rank, u32 ranks) {
  u32 slots = is_scratch(ref.buffer) ? p.scratch_slots : ref.buffer == PACKETS ? p.packet_slots : ranks;
  bool known = ref.rank == SELF || (ref.rank >= 0 && (u32)ref.rank < ranks && (u32)ref.rank != rank && ref.buffer != HOST);
  return ref.buffer <= HOST && ref.index < slots && ref.part < p.parts && known;
}

bool good_op(const cr_plan& p, const cr_op& op, u32 position) {
  u32 packet_sources = 0;
  bool parts = true;  // a user's chunk is as long as the operation, not shorter
  for (u32 k = 0; k < op.ndst + op.nsrc && op.ref + k < p.nrefs; k++) {
    const cr_ref& ref = p.refs[op.ref + k];
    packet_sources += k >= op.ndst && ref.buffer == PACKETS;
    parts &= ref.buffer > OUTPUT || ref.part == op.size_part;
  }
  bool counts = op.ndst <= MAX_REFS && op.nsrc <= MAX_REFS && packet_sources <= MAX_PACKET_SOURCES;
  bool inside = (u64)op.ref + op.ndst + op.nsrc <= p.nrefs && (u64)op.peer + op.npeers <= p.npeers;
  bool moves = op.code <= REDUCE || (op.code >= PUT_PACKETS && op.code <= SWITCH_BROADCAST);
  bool names = !moves || (op.ndst >= 1 && op.nsrc >= 1);
  bool loop = op.code != LOOP || (p.unit && op.target < position);
  return op.code <= LOOP && parts && counts && inside && names && loop && op.channel < MAX_CHANNELS && op.size_part < p.parts &&
         (!(op.flags & SLICED) || p.unit);
}

u64 hash(u64 a, u64 b) {
  unsigned __int128 wide = (unsigned __int128)(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xd6e8feb86659fd93ull);
  return (u64)wide ^ (u64)(wide >> 64);
}

bool gathers(u32 collective) { return collective == GATHER || collective == REDUCE_TO; }

// How peers name [at, at + nbytes): segment << 48 | offset, ~0 for nothing.
bool symmetric_name(const cr_comm& comm, const void* at, u64 nbytes, u64& name) {
  name = ~0ull;
  if (!at) return true;
  const Windows& own = comm.windows[comm.config.rank];
  for (u32 k = 0; k < own.n; k++) {
    u64 offset = (u64)at - own.base[k];
    if ((u64)at < own.base[k] || offset >= own.size[k] || nbytes > own.size[k] - offset) continue;
    name = (u64)k << 48 | offset;
    return true;
  }
  return false;
}

// Symmetric is an operation all of whose arrays on this rank are (where the root alone has an output, all inputs); the
// others' must be too, or the fingerprints differ.
// Where empty arrays lie means nothing, so they are ordinary on all ranks.
bool name_symmetric(const cr_comm& comm, const cr_call& call, Launch& L) {
  bool some = call.count && comm.windows[comm.config.rank].n;
  if (some && symmetric_name(comm, call.input, L.input_bytes, L.published_input) &&
      (symmetric_name(comm, call.output, L.output_bytes, L.published_output) || gathers(call.collective)))
    return true;
  L.published_input = (u64)call.input;
  L.published_output = (u64)call.output;
  return false;
}

const cr_program* routed(const cr_lane& lane, const cr_call& call, u32 shift, bool symmetric) {
  const Routes* routes = lane.routes[lane.row(call.collective, symmetric, call.root)].load(std::memory_order_acquire);
  if (!routes) return nullptr;
  u64 nbytes = (call.count << shift) * route_groups(call.collective, lane.lane.ranks);
  for (const Route& route : *routes)
    if (nbytes <= route.most_bytes) return route.program;
  return nullptr;
}

// Plain stores go where a peer reads: into its memory, or into scratch here that this rank itself never reads.
void mark_shared(const Program& program, Op* ops, u32 nops) {
  std::vector<u8> read(program.scratch_slots);
  for (u32 at = 0; at < nops; at++)
    for (u32 k = ops[at].ndst; k < ops[at].ndst + ops[at].nsrc; k++) {
      const Ref& ref = program.refs[ops[at].ref + k];
      if (is_scratch(ref.buffer) && ref.rank == SELF) read[ref.index] = 1;
    }
  for (u32 at = 0; at < nops; at++)
    for (u32 k = 0; k < ops[at].ndst; k++) {
      const Ref& ref = program.refs[ops[at].ref + k];
      bool shared = ref.buffer != PACKETS && (ref.rank != SELF || (is_scratch(ref.buffer) && !read[ref.index]));
      if (shared) ops[at].flags |= SHARED;
    }
}

// Hands out a block of memory piece by piece; with none, only counts.
class Pieces {
 public:
  explicit Pieces(char* memory) : memory_(memory) {}
  template <class T> T* take(u64 n) {
    at_ = (at_ + alignof(T) - 1) / alignof(T) * alignof(T);
    T* here = memory_ ? (T*)(memory_ + at_) : nullptr;
    at_ += n * sizeof(T);
    return here;
  }
  u64 taken() const { return at_; }

 private:
  char* memory_;
  u64 at_ = 0;
};

struct Parts { Program* program; Op* ops; Ref* refs; u32 *peers, *begin; u8* writes; };
Parts parts_of(const cr_plan& p, u32 ranks, Pieces& pieces) {
  Program* program = pieces.take<Program>(1);
  Op* ops = pieces.take<Op>(p.nops);
  Ref* refs = pieces.take<Ref>(p.nrefs);
  u32 *peers = pieces.take<u32>(p.npeers), *begin = pieces.take<u32>(p.nblocks + 1);
  return {program, ops, refs, peers, begin, pieces.take<u8>(ranks)};
}

// Most bytes of a chunk, so that all slots fit.
u64 most_part(const cr_plan& p, const Lane& l) {
  u64 most = 1ull << 40;
  if (p.scratch_slots) most = least(most, l.scratch_half / p.scratch_slots / LINE * LINE);
  if (p.packet_slots) most = least(most, (l.packets_half / p.packet_slots / LINE * LINE - PACKET) / PACKET * PACKET_DATA);
  return most / 64 * 64;
}

void fill(const Parts& to, const cr_plan& p, const Lane& l) {
  static_assert(sizeof(Op) == sizeof(cr_op) && sizeof(Ref) == sizeof(cr_ref));
  if (p.nops) memcpy((void*)to.ops, p.ops, p.nops * sizeof(Op));
  if (p.nrefs) memcpy((void*)to.refs, p.refs, p.nrefs * sizeof(Ref));
  std::copy(p.peers, p.peers + p.npeers, to.peers);
  std::copy(p.begin, p.begin + p.nblocks + 1, to.begin);
  std::fill(to.writes, to.writes + l.ranks, 0);
  for (u32 at = 0; at < p.nops; at++) {
    to.ops[at].flags &= FINAL | PUBLISH | SLICED;
    for (u32 k = 0; k < to.ops[at].ndst; k++)
      if (i32 rank = to.refs[to.ops[at].ref + k].rank; rank != SELF) to.writes[rank] = 1;
  }
  *to.program = {to.ops, to.refs, to.peers, to.begin, p.nblocks, p.parts, p.scratch_slots, p.packet_slots, p.unit,
                 most_part(p, l), p.synchronising, p.id, to.writes};
  mark_shared(*to.program, to.ops, p.nops);
}

}  // namespace

int validate(const cr_plan& p, u32 rank, u32 ranks) {
  if (!p.parts || !p.nblocks || p.nblocks > MAX_BLOCKS || p.begin[0] || p.begin[p.nblocks] != p.nops) return CR_INVALID;
  for (u32 k = 0; k < p.nrefs; k++)
    if (!good_ref(p, p.refs[k], rank, ranks)) return CR_INVALID;
  for (u32 k = 0; k < p.npeers; k++)
    if (p.peers[k] >= ranks || p.peers[k] == rank) return CR_INVALID;
  for (u32 b = 0; b < p.nblocks; b++) {
    if (p.begin[b] > p.begin[b + 1]) return CR_INVALID;
    for (u32 k = p.begin[b]; k < p.begin[b + 1]; k++)
      if (!good_op(p, p.ops[k], k - p.begin[b])) return CR_INVALID;
  }
  return CR_OK;
}

void input_output_groups(u32 collective, u32 ranks, u64& in, u64& out) {
  in = collective == REDUCE_SCATTER || collective == SCATTER || collective == ALL_TO_ALL ? ranks : 1;
  out = collective == ALL_GATHER || collective == GATHER || collective == ALL_TO_ALL ? ranks : 1;
}

u64 route_groups(u32 collective, u32 ranks) {
  u64 in, out;
  input_output_groups(collective, ranks, in, out);
  return in > out ? in : out;
}

bool prepare(cr_lane& lane, const cr_call& call, cr_launch& w, int& code) {
  Launch& L = w.launch;
  const cr_program* stored = call.program;
  u64 in, out;
  input_output_groups(call.collective, lane.lane.ranks, in, out);
  L.shift = log2_itemsize(call.dtype);
  L.reduce = cr_reduce_lookup(call.dtype, call.reduction);
  bool known = call.collective < COLLECTIVES && call.root < lane.lane.ranks && L.shift <= 4;
  if (!known || (reduces(call.collective) && !L.reduce)) return code = CR_INVALID, false;
  L.input_bytes = (call.count * in) << L.shift;
  L.output_bytes = (call.count * out) << L.shift;
  bool symmetric = name_symmetric(*lane.comm, call, L);
  if (!stored) stored = routed(lane, call, L.shift, symmetric);
  if (!stored) return code = CR_NEED_PLAN, false;
  if (stored->carried && !call.program) return code = CR_ELSEWHERE, false;
  const Program* program = stored->program;
  w.carried = stored->carried;
  L.program = program;
  L.lane = &lane.lane;
  L.input = (char*)call.input;
  L.output = (char*)call.output;
  L.count = call.count;
  L.divisor = call.reduction == 4 ? lane.lane.ranks : 0;
  L.windows = symmetric ? lane.windows.data() : nullptr;
  L.done = nullptr;
  u64 most = program->most_part >> L.shift;
  L.window = most > ~0ull / program->parts ? ~0ull : most * program->parts;
  L.what = call.collective | call.dtype << 8 | call.reduction << 16 | (u64)symmetric << 24 | (u64)program->id << 32;
  L.root = call.root;
  L.tag = hash(hash(L.what, call.count), call.root + 1);
  return true;
}

}  // namespace commrt

using namespace commrt;

extern "C" unsigned long long cr_program_bytes(const cr_plan* plan, unsigned ranks) {
  Pieces pieces(nullptr);
  parts_of(*plan, ranks, pieces);
  return pieces.taken();
}

extern "C" int cr_program_new(cr_lane* lane, const cr_plan* p, void* memory, cr_program** out) try {
  const Lane& l = lane->lane;
  if (validate(*p, l.rank, l.ranks) || most_part(*p, l) < 64) return CR_INVALID;  // not even a line fits in a slot
  auto stored = std::make_unique<cr_program>();
  if (!memory) stored->own.reset(new char[cr_program_bytes(p, l.ranks)]);
  Pieces pieces(memory ? (char*)memory : stored->own.get());
  Parts parts = parts_of(*p, l.ranks, pieces);
  fill(parts, *p, l);
  stored->program = parts.program;
  stored->carried = p->carried;
  *out = stored.get();
  lane->keep(std::move(stored));
  return CR_OK;
} catch (const std::bad_alloc&) {
  return CR_NO_MEMORY;
}

extern "C" int cr_lane_route(cr_lane* lane, unsigned collective, unsigned symmetric, unsigned root,
                             const unsigned long long* most_bytes, cr_program* const* programs, unsigned n) try {
  if (symmetric > 1 || root >= lane->lane.ranks || collective >= COLLECTIVES) return CR_INVALID;
  auto routes = std::make_unique<Routes>();
  for (u32 k = 0; k < n; k++) routes->push_back({most_bytes[k], programs[k]});
  lane->keep(lane->row(collective, symmetric, root), std::move(routes));
  return CR_OK;
} catch (const std::bad_alloc&) {
  return CR_NO_MEMORY;
}
