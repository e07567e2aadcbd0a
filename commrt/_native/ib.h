// InfiniBand and RoCE: devices, and links over queue pairs, for transports/ib. libibverbs is looked up at run time.
// Functions that return int and take `why` answer 0, or -1 with the reason in it.
#pragma once
#include "api.h"
#ifdef __cplusplus
extern "C" {
#endif
// CDEF BEGIN
typedef struct cr_ib cr_ib;            // an open device, and what is registered with it
typedef struct cr_ib_link cr_ib_link;  // one end of a link to a peer
typedef struct { char text[200]; } cr_ib_why;

typedef struct { unsigned int active, link_layer, lid, mtu, gids; } cr_ib_port;

// What the other end needs to know: queue pair, first packet number, where signals go, and where this port is.
typedef struct {
  unsigned int qpn, psn, ring_key, lid, mtu, link_layer;
  unsigned long long ring;
  unsigned char gid[16];
} cr_ib_end;

int cr_ib_load(const char* library, cr_ib_why* why);
// The name of the index-th device that can have reliable connections: 1; 0: there are no more; -1: why.
int cr_ib_device(unsigned int index, char name[64], cr_ib_why* why);

int cr_ib_open(const char* device, cr_ib** out, cr_ib_why* why);
void cr_ib_close(cr_ib*);  // after its links
int cr_ib_query_port(cr_ib*, unsigned int port, cr_ib_port* out);                           // 0 or an errno
int cr_ib_query_gid(cr_ib*, unsigned int port, unsigned int index, unsigned char gid[16]);  // 0 or an errno
// Registers this rank's memory of that number, up to close. Peers reach it at number << 48 of a port's offsets.
int cr_ib_register(cr_ib*, unsigned int number, void* memory, unsigned long long nbytes, unsigned int* key, cr_ib_why* why);

int cr_ib_link_new(cr_ib*, unsigned int port, unsigned int gid_index, unsigned int psn, cr_ib_link** out, cr_ib_why* why);
void cr_ib_link_end(const cr_ib_link*, cr_ib_end* out);
int cr_ib_link_join(cr_ib_link*, const cr_ib_end* peer, cr_ib_why* why);
// The peer's memory of that number. 0, or -1 if the number or the range is none.
int cr_ib_link_memory(cr_ib_link*, unsigned int number, unsigned long long address, unsigned long long nbytes, unsigned int key);
void cr_ib_link_port(cr_ib_link*, cr_port* out);
const char* cr_ib_link_trouble(const cr_ib_link*);  // what ended it, or ""
// Says goodbye on each behind all that was taken, waits for that to arrive or for so long, and frees them.
void cr_ib_links_leave(cr_ib_link* const*, unsigned int n, double patience_s);
// CDEF END
#ifdef __cplusplus
}
#endif
