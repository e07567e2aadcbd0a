// The fake libcuda.so.1: memory made, shared and mapped piece by piece.
#include "cuda_vmm.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <string>

using namespace fakecuda;
using fakegpu::Kind;

namespace {

std::mutex& mutex = *new std::mutex;
std::map<uint64_t, size_t>& reserved = *new std::map<uint64_t, size_t>;
std::map<uint64_t, Mapping>& mappings = *new std::map<uint64_t, Mapping>;

const auto FILE_DESCRIPTOR = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

bool whole(size_t n) { return n && n % GRANULE == 0; }

// The entry that holds all of [address, address + nbytes).
template <class T, class Size> auto entry_of(std::map<uint64_t, T>& entries, uint64_t address, size_t nbytes, Size size) {
  auto next = entries.upper_bound(address);
  if (next == entries.begin()) return entries.end();
  auto found = std::prev(next);
  return address - found->first + nbytes <= size(found->second) ? found : entries.end();
}

bool is_reserved(uint64_t address, size_t nbytes) {
  return entry_of(reserved, address, nbytes, [](size_t n) { return n; }) != reserved.end();
}

bool overlaps_mapping(uint64_t address, size_t nbytes) {
  auto next = mappings.lower_bound(address);
  if (next != mappings.end() && next->first < address + nbytes) return true;
  return next != mappings.begin() && std::prev(next)->first + std::prev(next)->second.nbytes > address;
}

void* reserve(void* at, size_t nbytes, int flags) {
  return mmap(at, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

bool is_named(int fd, const char* name) {
  char link[64] = {}, path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  return readlink(path, link, sizeof link - 1) > 0 && strstr(link, name);
}

}  // namespace

namespace fakecuda {

std::atomic<unsigned> mapping_changes{0};

Handles<Physical>& physicals() {
  static Handles<Physical>& all = *new Handles<Physical>;
  return all;
}

std::shared_ptr<Physical> physical(CUmemGenericAllocationHandle handle) { return physicals().get((void*)handle); }

std::pair<uint64_t, Mapping> mapping_at(uint64_t address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = entry_of(mappings, address, 1, [](const Mapping& mapping) { return mapping.nbytes; });
  if (found == mappings.end()) return {0, Mapping{}};
  return {found->first, found->second};
}

}  // namespace fakecuda

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* nbytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  FAKE_CALL;
  *nbytes = GRANULE;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  FAKE_CALL;
  bool of_device = properties->type == CU_MEM_ALLOCATION_TYPE_PINNED && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (!whole(nbytes) || flags || !of_device) return CUDA_ERROR_INVALID_VALUE;
  int device = properties->location.id, fd = memfd_create("fakegpu-memory", MFD_CLOEXEC);
  if (device < 0 || device >= fakegpu::devices()) return CUDA_ERROR_INVALID_DEVICE;
  if (nbytes > fakegpu::free_nbytes(device) || fd < 0 || ftruncate(fd, nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  bool shareable = properties->requestedHandleTypes & FILE_DESCRIPTOR;
  *handle = (uint64_t)physicals().add(std::shared_ptr<Physical>(new Physical{fd, nbytes, device, false, shareable}));
  return CUDA_SUCCESS;
}

// What is mapped or bound stays until it is not.
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_CALL;
  return physicals().remove((void*)handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  FAKE_CALL;
  auto memory = physical(handle);
  if (!memory || flags || type != FILE_DESCRIPTOR || !memory->shareable) return CUDA_ERROR_INVALID_VALUE;
  *(int*)out = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* given, CUmemAllocationHandleType type) {
  FAKE_CALL;
  bool multicast = is_named((int)(intptr_t)given, "fakegpu-multicast");
  bool ours = multicast || is_named((int)(intptr_t)given, "fakegpu-memory");
  if (type != FILE_DESCRIPTOR || !ours) return CUDA_ERROR_INVALID_VALUE;
  int fd = fcntl((int)(intptr_t)given, F_DUPFD_CLOEXEC, 0);
  struct stat file;
  if (fd < 0 || fstat(fd, &file)) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t nbytes = multicast ? team_nbytes(fd) : file.st_size;
  int unknown = -1;  // no property of an import says whose it is
  *handle = (uint64_t)physicals().add(std::shared_ptr<Physical>(new Physical{fd, nbytes, unknown, multicast, true}));
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t nbytes, size_t alignment, CUdeviceptr, unsigned long long flags) {
  FAKE_CALL;
  if (!whole(nbytes) || flags || (alignment & (alignment - 1))) return CUDA_ERROR_INVALID_VALUE;
  size_t unit = alignment > GRANULE ? alignment : GRANULE;
  void* room = reserve(nullptr, nbytes + unit, 0);
  if (room == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = ((uint64_t)room + unit - 1) / unit * unit;
  std::lock_guard<std::mutex> guard(mutex);
  reserved[*address] = nbytes;
  return CUDA_SUCCESS;
}

// The addresses are never given out again, so that their use is seen.
CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
  FAKE_CALL;
  std::lock_guard<std::mutex> guard(mutex);
  auto found = reserved.find(address);
  bool exact = found != reserved.end() && found->second == nbytes;
  if (!exact || overlaps_mapping(address, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  reserved.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  FAKE_CALL;
  auto memory = physical(handle);
  if (!memory || flags || !whole(nbytes) || address % GRANULE || offset % GRANULE) return CUDA_ERROR_INVALID_VALUE;
  if (offset > memory->nbytes || nbytes > memory->nbytes - offset) return CUDA_ERROR_INVALID_VALUE;
  if (memory->multicast && !team_is_whole(*memory)) return CUDA_ERROR_NOT_READY;  // a driver blocks here
  std::lock_guard<std::mutex> guard(mutex);
  if (!is_reserved(address, nbytes) || overlaps_mapping(address, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  if (!memory->multicast) mmap((void*)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, offset);
  mappings[address] = {memory, nbytes, offset};
  mapping_changes++;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
  FAKE_CALL;
  std::lock_guard<std::mutex> guard(mutex);
  auto found = mappings.find(address);
  if (found == mappings.end() || found->second.nbytes != nbytes) return CUDA_ERROR_INVALID_VALUE;
  reserve((void*)address, nbytes, MAP_FIXED);
  fakegpu::forget_block(address);
  mappings.erase(found);
  mapping_changes++;
  return CUDA_SUCCESS;
}

// Plain loads and stores never reach a multicast object: its addresses stay inaccessible to the CPU.
CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc* access, size_t count) {
  FAKE_CALL;
  auto [start, mapping] = mapping_at(address);
  if (!count || start != address || mapping.nbytes != nbytes) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (access[i].location.id < 0 || access[i].location.id >= fakegpu::devices()) return CUDA_ERROR_INVALID_DEVICE;
  }
  bool open = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (!mapping.physical->multicast && mprotect((void*)address, nbytes, open ? PROT_READ | PROT_WRITE : PROT_NONE))
    return CUDA_ERROR_INVALID_VALUE;
  Kind kind = open && !mapping.physical->multicast ? Kind::MAPPED : Kind::MULTICAST;
  fakegpu::note_block(address, nbytes, kind, access->location.id);
  return CUDA_SUCCESS;
}

}  // extern "C"

static Symbols added({
    FAKE_SYMBOL(cuMemGetAllocationGranularity, 10020),
    FAKE_SYMBOL(cuMemCreate, 10020),
    FAKE_SYMBOL(cuMemRelease, 10020),
    FAKE_SYMBOL(cuMemExportToShareableHandle, 10020),
    FAKE_SYMBOL(cuMemImportFromShareableHandle, 10020),
    FAKE_SYMBOL(cuMemAddressReserve, 10020),
    FAKE_SYMBOL(cuMemAddressFree, 10020),
    FAKE_SYMBOL(cuMemMap, 10020),
    FAKE_SYMBOL(cuMemUnmap, 10020),
    FAKE_SYMBOL(cuMemSetAccess, 10020),
});
