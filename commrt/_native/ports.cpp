// Ports over this machine's own memory: the process's own, and another's through process_vm_readv.
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "../../algorithms/device/platform.h"
#include "api.h"

namespace {

int nothing(void*) { return 1; }
int quiet(void*) { return 0; }

int copy_here(void*, void* to, unsigned long long from, unsigned long long nbytes) {
  memcpy(to, (const void*)from, nbytes);
  return 1;
}

int copy_from_process(void* pid, void* to, unsigned long long from, unsigned long long nbytes) {
  while (nbytes) {
    iovec here{to, nbytes}, there{(void*)from, nbytes};
    ssize_t n = process_vm_readv((pid_t)(u64)pid, &here, 1, &there, 1, 0);
    if (n <= 0) return -errno;
    to = (char*)to + n, from += n, nbytes -= n;
  }
  return 1;
}

}  // namespace

extern "C" void cr_port_same_process(cr_port* port) { *port = {nullptr, nullptr, nullptr, copy_here, nothing, quiet}; }
extern "C" void cr_port_process_vm(cr_port* port, int pid) {
  *port = {(void*)(u64)pid, nullptr, nullptr, copy_from_process, nothing, quiet};
}
extern "C" void cr_store_release(unsigned long long* word, unsigned long long value) { commrt::store_release(word, value); }
