// A libibverbs that finds one device, as far as a probe goes. NODE: what kind of device, 0: none. STATE: of its one port.
// BROKEN: it lacks ibv_create_qp.
#include <errno.h>
#include <stddef.h>
#include <string.h>

#ifndef NODE
#define NODE 1
#endif
#ifndef STATE
#define STATE 4
#endif
#ifndef OPENS
#define OPENS 1
#endif

static struct { void* ops[2]; int node, transport; } device = {{0, 0}, NODE, 0};
static void *devices[] = {&device, NULL}, *context[100];

void** ibv_get_device_list(int* n) { return *n = NODE != 0, devices; }
void ibv_free_device_list(void** list) { (void)list; }
const char* ibv_get_device_name(void* d) { return (void)d, "fake0"; }
void* ibv_open_device(void* d) { return (void)d, errno = EACCES, OPENS ? context : NULL; }
int ibv_close_device(void* c) { return (void)c, 0; }
int ibv_query_port(void* c, unsigned char port, int* attributes) {
  (void)c;
  return port != 1 ? EINVAL : (attributes[0] = STATE, 0);
}
int ibv_query_gid(void) { return -1; }
void* ibv_alloc_pd(void* c) { return c; }
int ibv_dealloc_pd(void) { return 0; }
void* ibv_reg_mr(void) { return NULL; }
int ibv_dereg_mr(void) { return 0; }
void* ibv_create_cq(void) { return NULL; }
int ibv_destroy_cq(void) { return 0; }
#ifndef BROKEN
void* ibv_create_qp(void) { return NULL; }
#endif
int ibv_modify_qp(void) { return EINVAL; }
int ibv_destroy_qp(void) { return 0; }
const char* ibv_wc_status_str(int status) { return (void)status, "fake"; }
int ibv_fork_init(void) { return 0; }
