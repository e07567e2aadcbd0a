// Memory that other processes of this host can map: anonymous files, found by process and descriptor, gone with their owner.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../algorithms/device/platform.h"
#include "api.h"

namespace {

// A forked child must not share what peers write to.
int map(int fd, unsigned long long nbytes, void** address) {
  void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED || madvise(at, nbytes, MADV_DONTFORK)) {
    int error = errno;
    if (at != MAP_FAILED) munmap(at, nbytes);
    close(fd);
    return -error;
  }
  *address = at;
  return 0;
}

}  // namespace

extern "C" {

int cr_memory_create(unsigned long long nbytes, int* fd, void** address) {
  *fd = memfd_create("commrt", MFD_CLOEXEC);
  if (*fd < 0) return -errno;
  if (ftruncate(*fd, (off_t)nbytes)) {
    int error = errno;
    return close(*fd), -error;
  }
  return map(*fd, nbytes, address);
}

int cr_memory_open(const char* path, unsigned long long nbytes, unsigned long long inode, int* fd, void** address) {
  struct stat found;
  *fd = open(path, O_RDWR | O_CLOEXEC);
  if (*fd < 0) return -errno;
  bool right = !fstat(*fd, &found) && S_ISREG(found.st_mode) && found.st_uid == geteuid() && found.st_ino == inode &&
               (unsigned long long)found.st_size == nbytes;
  if (!right) return close(*fd), -ESTALE;
  return map(*fd, nbytes, address);
}

int cr_memory_lock(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return fcntl(fd, F_SETLK, &lock) ? -errno : 0;
}

// The kernel drops the lock of a process that is gone, whatever its pid namespace.
int cr_memory_owner_lives(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return fcntl(fd, F_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}

void cr_memory_close(void* address, unsigned long long nbytes, int fd) {
  munmap(address, nbytes);
  close(fd);
}
}
