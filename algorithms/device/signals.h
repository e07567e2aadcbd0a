// Signals between ranks, on mapped links and on ports alike. Lines alternate by epoch parity: a peer may be one epoch ahead.
#pragma once
#include "address.h"
#include "wait.h"

namespace commrt {

CR_DEV u32 line_of(const Launch& L, const Op& op) { return op.channel * 2 + (L.epoch & 1); }

CR_DEV void signal_mapped(const Launch& L, const Op& op, Peer& peer) {
  Line* line = peer.out + line_of(L, op);
  store_relaxed(&line->tag, L.tag);
  if (op.flags & PUBLISH) {
    store_relaxed(&line->input, L.published_input);
    store_relaxed(&line->output, L.published_output);
  }
  store_release(&line->value, ++peer.posted[op.channel]);
}

#if !CR_GPU
inline bool port_answer(Block& b, u32 rank, int answer) { return answer < 0 ? fail(b, TRANSPORT, rank) : answer > 0; }

// The words travel as a put that the signal follows. `half` remembers
// that the first was taken, should the second be refused.
inline bool signal_port(Block& b, const Launch& L, const Op& op, Peer& peer, u32 rank) {
  u64 at = peer.out_at + line_of(L, op) * sizeof(Line);
  u64 words[3] = {L.tag, L.published_input, L.published_output};
  if (b.half != rank + 1) {
    if (!port_answer(b, rank, peer.port->put(peer.port->context, at + 8, words, sizeof words))) return false;
    b.half = rank + 1;
  }
  if (!port_answer(b, rank, peer.port->signal(peer.port->context, at, peer.posted[op.channel] + 1))) return false;
  b.half = 0;
  peer.posted[op.channel]++;
  return true;
}
#endif

CR_DEV bool do_signal(Block& b, const Launch& L, const Op& op) {
  return each(b, L, op.npeers, [&](u64 k) {
    u32 rank = L.program->peers[op.peer + k];
    Peer& peer = L.lane->peers[rank];
#if !CR_GPU
    if (peer.port) return signal_port(b, L, op, peer, rank);
#endif
    signal_mapped(L, op, peer);
    return true;
  });
}

// A peer's name for its buffer, as an address here. Names of symmetric memory are (segment << 48 | offset), bounded.
CR_DEV bool learn(const Launch& L, u32 rank, u64 name, u64 nbytes, u64& to) {
  if (!L.windows) return to = name, true;
  const Windows& windows = L.windows[rank];
  u64 segment = name >> 48, offset = name & 0xffffffffffffull;
  if (name == ~0ull) return to = 0, true;
  if (segment >= windows.n || offset > windows.size[segment] || nbytes > windows.size[segment] - offset) return false;
  to = windows.base[segment] + offset;
  return true;
}

CR_DEV bool do_wait(Block& b, const Launch& L, const Op& op) {
  return each(b, L, op.npeers, [&](u64 k) {
    u32 rank = L.program->peers[op.peer + k];
    Peer& peer = L.lane->peers[rank];
    const Line* line = peer.in + line_of(L, op);
    if (load_acquire(&line->value) < peer.expected[op.channel] + 1) return false;
    if (load_relaxed(&line->tag) != L.tag) return fail(b, MISMATCH, rank);
    if (op.flags & PUBLISH) {
      bool known = learn(L, rank, load_relaxed(&line->input), L.input_bytes, peer.input);
      known &= learn(L, rank, load_relaxed(&line->output), L.output_bytes, peer.output);
      if (!known) return fail(b, BOUNDS, rank);
    }
    peer.expected[op.channel]++;
    return true;
  });
}

}  // namespace commrt
