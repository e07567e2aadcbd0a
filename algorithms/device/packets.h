// Packets: data and flag in one store, so that a reader needs no signal. LL8: 4 bytes of data in 8. LL16: 8 in 16, as two
// flagged 8-byte words, since wider stores are not atomic everywhere. A flag of 0 is never valid.
#pragma once
#include "platform.h"

namespace commrt {

enum { PACKET = 16, PACKET_DATA = 8 };

CR_DEV void put_ll8(u64* packet, u32 data, u32 flag) { store_packet(packet, data | (u64)flag << 32); }

CR_DEV bool get_ll8(const u64* packet, u32 flag, u32& data) {
  u64 word = load_packet(packet);
  data = (u32)word;
  return (u32)(word >> 32) == flag;
}

#if CR_CUDA
CR_DEV void put_ll16(u64* packet, u64 data, u32 flag) {
  u64 low = (u32)data | (u64)flag << 32, high = data >> 32 | (u64)flag << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(packet), "l"(low), "l"(high) : "memory");
}
CR_DEV bool get_ll16(const u64* packet, u32 flag, u64& data) {
  u64 low, high;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(low), "=l"(high) : "l"(packet) : "memory");
  data = (u32)low | high << 32;
  return (u32)(low >> 32) == flag && (seeded(Seeded::ONE_FLAG) || (u32)(high >> 32) == flag);
}
#else
CR_DEV void put_ll16(u64* packet, u64 data, u32 flag) {
  put_ll8(packet, (u32)data, flag);
  put_ll8(packet + 1, (u32)(data >> 32), flag);
}
CR_DEV bool get_ll16(const u64* packet, u32 flag, u64& data) {
  u32 low, high;
  bool whole = get_ll8(packet, flag, low);
  whole &= get_ll8(packet + 1, flag, high);
  data = low | (u64)high << 32;
  return whole;
}
#endif

CR_DEV bool whole_words(const char* p) { return !CR_GPU || !((u64)p & 7); }

// 8 bytes of a plain buffer at any alignment, or what is left of it.
CR_DEV u64 load_word(const char* p, u64 left) {
  if (left >= 8 && whole_words(p)) return plain_load<u64>(p);
  u64 word = 0;
  for (u32 i = 0; i < (left < 8 ? left : 8); i++) word |= (u64)plain_load<u8>(p + i) << 8 * i;
  return word;
}

CR_DEV void store_word(char* p, u64 word, u64 left) {
  if (left >= 8 && whole_words(p)) return plain_store(p, word);
  for (u32 i = 0; i < (left < 8 ? left : 8); i++) plain_store(p + i, (u8)(word >> 8 * i));
}

}  // namespace commrt
