// The fake libcuda.so.1: multicast objects. Several devices, and processes, bind memory to one; an address of it stands
// for the same place in all of them.
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <tuple>

#include "cuda_vmm.h"

using namespace fakecuda;

namespace {

enum { MOST_DEVICES = 16, MOST_BOUND = 64, STATE_NBYTES = 8192 };

struct Bound {
  int device, pid, fd;  // whose memory: its file, as the process that bound it knows it; pid 0: nothing is bound
  uint64_t inode, memory_offset, offset, nbytes;

  bool overlaps(uint64_t at, uint64_t n) const { return at < offset + nbytes && offset < at + n; }
};

// In the object's file, shared by all processes that have it.
struct Team {
  std::atomic<int> locked;
  std::atomic<unsigned> changes;
  int wanted, added;
  int devices[MOST_DEVICES];
  uint64_t nbytes;
  Bound bound[MOST_BOUND];

  bool has(int device) const { return std::find(devices, devices + added, device) != devices + added; }
};
static_assert(sizeof(Team) <= STATE_NBYTES, "the state fits its file");

// Mapped once, for good.
Team* team_of(int fd) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::map<uint64_t, Team*>;
  struct stat file;
  fstat(fd, &file);
  std::lock_guard<std::mutex> guard(mutex);
  Team*& team = known[file.st_ino];
  if (!team) team = (Team*)mmap(nullptr, STATE_NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return team;
}

class Locked {
 public:
  explicit Locked(int fd) : team_(team_of(fd)) {
    while (team_->locked.exchange(1)) usleep(50);
  }
  ~Locked() { team_->locked = 0; }
  Team* operator->() { return team_; }

 private:
  Team* team_;
};

std::shared_ptr<Physical> multicast_object(CUmemGenericAllocationHandle handle) {
  auto found = physical(handle);
  return found && found->multicast ? found : nullptr;
}

CUresult bind(CUmemGenericAllocationHandle object, int device, uint64_t at, std::shared_ptr<Physical> memory, uint64_t from,
              uint64_t nbytes) {
  auto multicast = multicast_object(object);
  if (!multicast || !memory || memory->multicast || !nbytes || (at | from | nbytes) % GRANULE) return CUDA_ERROR_INVALID_VALUE;
  if (at + nbytes > multicast->nbytes || from + nbytes > memory->nbytes) return CUDA_ERROR_INVALID_VALUE;
  if (multicast->shareable && !memory->shareable) return CUDA_ERROR_INVALID_VALUE;
  Locked team(multicast->fd);
  if (team->added != team->wanted) return CUDA_ERROR_NOT_READY;  // a driver blocks here
  if (!team->has(device)) return CUDA_ERROR_INVALID_DEVICE;
  Bound* free = nullptr;
  for (auto& bound : team->bound) {
    if (bound.pid && bound.device == device && bound.overlaps(at, nbytes)) return CUDA_ERROR_INVALID_VALUE;
    if (!bound.pid && !free) free = &bound;
  }
  struct stat file;
  int kept = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);  // for as long as it is bound
  if (!free || kept < 0 || fstat(kept, &file)) return CUDA_ERROR_OUT_OF_MEMORY;
  *free = {device, getpid(), kept, file.st_ino, from, at, nbytes};
  team->changes++;
  return CUDA_SUCCESS;
}

// Where another process's file is mapped here: all of it, once, for good.
char* map_file(const Bound& bound) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::map<uint64_t, char*>;
  std::lock_guard<std::mutex> guard(mutex);
  auto found = known.find(bound.inode);
  if (found != known.end()) return found->second;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", bound.pid, bound.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat file;
  if (fd < 0 || fstat(fd, &file) || file.st_ino != bound.inode) return nullptr;
  char* at = (char*)mmap(nullptr, file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return known[bound.inode] = at;
}

[[noreturn]] void refuse(const void* address, const char* why) {
  fprintf(stderr, "fakegpu: multimem at %p: %s\n", address, why);
  abort();
}

// What was found last by this thread, for the piece of addresses around it.
struct Found {
  uint64_t piece = 0;
  unsigned mapping_changes = 0, changes = 0;
  const Team* team = nullptr;
  std::vector<char*> members;  // by the order of devices, so that sums are alike everywhere

  bool holds(uint64_t address) const {
    return piece == address / GRANULE && mapping_changes == fakecuda::mapping_changes && team && changes == team->changes;
  }
  void look(const void* address);
};

void Found::look(const void* address) {
  fakegpu::injected("multimem");  // for the log
  piece = (uint64_t)address / GRANULE;
  mapping_changes = fakecuda::mapping_changes;
  auto [start, mapping] = mapping_at((uint64_t)address);
  if (!start || !mapping.physical->multicast) refuse(address, "not a multicast address");
  uint64_t at = piece * GRANULE - start + mapping.offset;
  std::vector<Bound> here;
  team = team_of(mapping.physical->fd);
  Locked locked(mapping.physical->fd);
  changes = team->changes;
  for (auto& bound : team->bound)
    if (bound.pid && bound.overlaps(at, GRANULE)) here.push_back(bound);
  if ((int)here.size() != team->wanted) refuse(address, "not all devices have bound memory there");
  std::sort(here.begin(), here.end(), [](auto& one, auto& other) { return one.device < other.device; });
  members.clear();
  for (auto& bound : here) {
    char* file = map_file(bound);
    if (!file) refuse(address, "memory of a process that is gone");
    members.push_back(file + bound.memory_offset + (at - bound.offset));
  }
}

void* member_at(const void* address, unsigned member) {
  static thread_local Found found;
  if (!found.holds((uint64_t)address)) found.look(address);
  return member < found.members.size() ? found.members[member] + (uint64_t)address % GRANULE : nullptr;
}

const bool installed = (fakegpu::multicast = member_at, true);

}  // namespace

namespace fakecuda {

bool team_is_whole(const Physical& object) {
  Locked team(object.fd);
  return team->added == team->wanted;
}

size_t team_nbytes(int fd) { return Locked(fd)->nbytes; }

}  // namespace fakecuda

extern "C" {

CUresult cuMulticastGetGranularity(size_t* nbytes, const CUmulticastObjectProp*, CUmulticastGranularity_flags) {
  FAKE_CALL;
  *nbytes = GRANULE;
  return CUDA_SUCCESS;
}

// Of one device: drivers are said to refuse that.
CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* properties) {
  FAKE_CALL;
  if (!fakegpu::setting("FAKEGPU_MULTICAST", 1)) return CUDA_ERROR_NOT_SUPPORTED;
  bool sized = properties->size && properties->size % GRANULE == 0;
  if (!sized || properties->numDevices < 2 || properties->numDevices > MOST_DEVICES || properties->flags) return CUDA_ERROR_INVALID_VALUE;
  int fd = memfd_create("fakegpu-multicast", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, STATE_NBYTES)) return CUDA_ERROR_OUT_OF_MEMORY;
  {
    Locked team(fd);
    team->wanted = properties->numDevices;
    team->nbytes = properties->size;
  }
  bool shareable = properties->handleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  *handle = (uint64_t)physicals().add(std::shared_ptr<Physical>(new Physical{fd, properties->size, -1, true, shareable}));
  return CUDA_SUCCESS;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  FAKE_CALL;
  auto object = multicast_object(handle);
  if (!object) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0 || device >= fakegpu::devices()) return CUDA_ERROR_INVALID_DEVICE;
  Locked team(object->fd);
  if (team->added == team->wanted || team->has(device)) return CUDA_ERROR_INVALID_VALUE;
  team->devices[team->added++] = device;
  return CUDA_SUCCESS;
}

CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
                               CUmemGenericAllocationHandle handle, size_t from, size_t nbytes, unsigned long long flags) {
  FAKE_CALL;
  auto memory = physical(handle);
  if (flags || !memory) return CUDA_ERROR_INVALID_VALUE;
  return memory->device == device ? bind(object, device, at, memory, from, nbytes) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t at, CUmemGenericAllocationHandle handle, size_t from,
                            size_t nbytes, unsigned long long flags) {
  FAKE_CALL;
  auto memory = physical(handle);
  return flags || !memory ? CUDA_ERROR_INVALID_VALUE : bind(object, memory->device, at, memory, from, nbytes);
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t at, CUdeviceptr address, size_t nbytes,
                             unsigned long long flags) {
  FAKE_CALL;
  auto [start, mapping] = mapping_at(address);
  if (flags || !start || address - start + nbytes > mapping.nbytes) return CUDA_ERROR_INVALID_VALUE;
  return bind(object, mapping.physical->device, at, mapping.physical, address - start + mapping.offset, nbytes);
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t at, size_t nbytes) {
  FAKE_CALL;
  auto object = multicast_object(handle);
  if (!object) return CUDA_ERROR_INVALID_VALUE;
  Locked team(object->fd);
  for (auto& bound : team->bound) {
    if (!bound.pid || std::tie(bound.device, bound.offset, bound.nbytes) != std::make_tuple(device, at, nbytes)) continue;
    if (bound.pid == getpid()) close(bound.fd);
    return bound.pid = 0, team->changes++, CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"

static Symbols added({
    FAKE_SYMBOL(cuMulticastGetGranularity, 12010),
    FAKE_SYMBOL(cuMulticastCreate, 12010),
    FAKE_SYMBOL(cuMulticastAddDevice, 12010),
    FAKE_SYMBOL(cuMulticastBindMem, 12010),
    {"cuMulticastBindMem", 13010, (void*)cuMulticastBindMem_v2},
    FAKE_SYMBOL(cuMulticastBindAddr, 12010),
    FAKE_SYMBOL(cuMulticastUnbind, 12010),
});
