// Physical memory and its mappings, as the files of the fake libcuda.so.1 share them.
#pragma once
#include <unistd.h>

#include <atomic>

#include "cuda_driver.h"

namespace fakecuda {

enum : size_t { GRANULE = 2 << 20 };

// What a CUmemGenericAllocationHandle names: memory of a device, or a multicast object, whose file holds its state.
struct Physical {
  int fd;
  size_t nbytes;
  int device;
  bool multicast, shareable;

  ~Physical() { close(fd); }
};

struct Mapping {
  std::shared_ptr<Physical> physical;
  size_t nbytes, offset;
};

Handles<Physical>& physicals();
std::shared_ptr<Physical> physical(CUmemGenericAllocationHandle handle);
std::pair<uint64_t, Mapping> mapping_at(uint64_t address);  // its start, 0 if there is none
extern std::atomic<unsigned> mapping_changes;               // how many there were

// Of a multicast object.
bool team_is_whole(const Physical& object);
size_t team_nbytes(int fd);

}  // namespace fakecuda
