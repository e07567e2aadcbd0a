// The fake libcuda.so.1: memory of devices and hosts, copies, and memory of other processes.
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda_driver.h"

using namespace fakecuda;
using fakegpu::Kind;

namespace {

const int BAD_ADDRESS = CUDA_ERROR_ILLEGAL_ADDRESS;

CUresult copy_now(uint64_t to, uint64_t from, size_t nbytes) {
  auto stream = fakegpu::default_stream(device());
  bool done = false;
  stream->wait(stream->submit([&] { return done = fakegpu::copy(to, from, nbytes), 0; }));
  return done ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult copy_later(uint64_t to, uint64_t from, size_t nbytes, CUstream handle) {
  auto stream = fakecuda::stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  stream->submit([=] { return fakegpu::copy(to, from, nbytes) ? 0 : BAD_ADDRESS; });
  return CUDA_SUCCESS;
}

bool is_on_device(uint64_t address, size_t nbytes) {
  auto block = fakegpu::find(address);
  return block && block->kind != Kind::REGISTERED && fakegpu::holds(address, nbytes);
}

bool is_mapped(void* address, size_t nbytes) {
  uintptr_t start = (uintptr_t)address & ~4095ul, end = (uintptr_t)address + nbytes;
  std::vector<unsigned char> pages((end - start + 4095) / 4096);
  return !mincore((void*)start, end - start, pages.data());
}

CUresult free_memory(uint64_t address, Kind kind) {
  fakegpu::synchronize_device(device());
  return fakegpu::release(address, kind) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

extern "C" {

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  FAKE_CALL_IN_CONTEXT;
  *free = fakegpu::free_nbytes(device());
  *total = fakegpu::setting("FAKEGPU_MEMORY", 1 << 30);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t nbytes) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  if (!nbytes) return CUDA_ERROR_INVALID_VALUE;
  *address = fakegpu::allocate(device(), nbytes, Kind::DEVICE);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr address) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  return address ? free_memory(address, Kind::DEVICE) : CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** address, size_t nbytes, unsigned flags) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  const unsigned known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (!nbytes || flags & ~known) return CUDA_ERROR_INVALID_VALUE;
  *address = (void*)fakegpu::allocate(device(), nbytes, Kind::HOST);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void* address) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  return free_memory((uint64_t)address, Kind::HOST);
}

CUresult cuMemHostRegister(void* address, size_t nbytes, unsigned flags) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  const unsigned known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  if (!nbytes || flags & ~known || !is_mapped(address, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  bool fresh = fakegpu::register_host((uint64_t)address, nbytes);
  return fresh ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult cuMemHostUnregister(void* address) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  CUresult code = free_memory((uint64_t)address, Kind::REGISTERED);
  return code == CUDA_SUCCESS ? code : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* host, unsigned flags) {
  FAKE_CALL_IN_CONTEXT;
  auto block = fakegpu::find((uint64_t)host);
  if (flags || !block || (block->kind != Kind::HOST && block->kind != Kind::REGISTERED)) return CUDA_ERROR_INVALID_VALUE;
  *address = (CUdeviceptr)host;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* nbytes, CUdeviceptr address) {
  FAKE_CALL_IN_CONTEXT;
  auto block = fakegpu::find(address);
  if (!block) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = block->address;
  if (nbytes) *nbytes = block->nbytes;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  FAKE_CALL_IN_CONTEXT;
  auto block = fakegpu::find(address);
  if (!block) return CUDA_ERROR_INVALID_VALUE;
  bool host = block->kind == Kind::HOST || block->kind == Kind::REGISTERED;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned*)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = block->device; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)value = address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)value = block->address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)value = block->nbytes; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t nbytes) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  return copy_now(to, from, nbytes);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t nbytes) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  return is_on_device(to, nbytes) ? copy_now(to, (uint64_t)from, nbytes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t nbytes) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  return is_on_device(from, nbytes) ? copy_now((uint64_t)to, from, nbytes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t nbytes) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  bool whole = is_on_device(to, nbytes) && is_on_device(from, nbytes);
  return whole ? copy_now(to, from, nbytes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  FAKE_CALL_IN_CONTEXT;
  return copy_later(to, from, nbytes, stream);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t nbytes, CUstream stream) {
  FAKE_CALL_IN_CONTEXT;
  return is_on_device(to, nbytes) ? copy_later(to, (uint64_t)from, nbytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  FAKE_CALL_IN_CONTEXT;
  return is_on_device(from, nbytes) ? copy_later((uint64_t)to, from, nbytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  FAKE_CALL_IN_CONTEXT;
  bool whole = is_on_device(to, nbytes) && is_on_device(from, nbytes);
  return whole ? copy_later(to, from, nbytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t nbytes) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  if (!is_on_device(to, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  auto stream = fakegpu::default_stream(device());  // returns before it is done, as a real one may
  stream->submit([=] { return fakegpu::fill(to, value, nbytes) ? 0 : BAD_ADDRESS; });
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream handle) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = fakecuda::stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!is_on_device(to, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  stream->submit([=] { return fakegpu::fill(to, value, nbytes) ? 0 : BAD_ADDRESS; });
  return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  FAKE_CALL_IN_CONTEXT;
  fakegpu::Handle made;
  if (!fakegpu::export_block(address, made)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(handle, &made, sizeof made);
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  fakegpu::Handle given;
  memcpy(&given, &handle, sizeof given);
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  int owner = fakegpu::device_of(given);
  if (owner >= 0 && owner != device() && !fakegpu::setting("FAKEGPU_PEERS", 1)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  uint64_t opened = 0;
  switch (fakegpu::open_block(given, device(), opened)) {
    case fakegpu::Opened::OK: break;
    case fakegpu::Opened::MALFORMED: return CUDA_ERROR_INVALID_VALUE;
    case fakegpu::Opened::OWN_PROCESS: return CUDA_ERROR_INVALID_CONTEXT;
    case fakegpu::Opened::GONE: return CUDA_ERROR_MAP_FAILED;
  }
  *address = opened;
  return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  return free_memory(address, Kind::IMPORTED);
}

}  // extern "C"

static Symbols added({
    FAKE_SYMBOL(cuMemGetInfo, 3020),
    FAKE_SYMBOL(cuMemAlloc, 3020),
    FAKE_SYMBOL(cuMemFree, 3020),
    FAKE_SYMBOL(cuMemHostAlloc, 2020),
    FAKE_SYMBOL(cuMemFreeHost, 2000),
    FAKE_SYMBOL(cuMemHostRegister, 6050),
    FAKE_SYMBOL(cuMemHostUnregister, 4000),
    FAKE_SYMBOL(cuMemHostGetDevicePointer, 3020),
    FAKE_SYMBOL(cuMemGetAddressRange, 3020),
    FAKE_SYMBOL(cuPointerGetAttribute, 4000),
    FAKE_SYMBOL(cuMemcpy, 4000),
    FAKE_SYMBOL(cuMemcpyHtoD, 3020),
    FAKE_SYMBOL(cuMemcpyDtoH, 3020),
    FAKE_SYMBOL(cuMemcpyDtoD, 3020),
    FAKE_SYMBOL(cuMemcpyAsync, 4000),
    FAKE_SYMBOL(cuMemcpyHtoDAsync, 3020),
    FAKE_SYMBOL(cuMemcpyDtoHAsync, 3020),
    FAKE_SYMBOL(cuMemcpyDtoDAsync, 3020),
    FAKE_SYMBOL(cuMemsetD8, 3020),
    FAKE_SYMBOL(cuMemsetD8Async, 3020),
    FAKE_SYMBOL(cuIpcGetMemHandle, 4010),
    FAKE_SYMBOL(cuIpcOpenMemHandle, 11000),
    FAKE_SYMBOL(cuIpcCloseMemHandle, 4010),
});
