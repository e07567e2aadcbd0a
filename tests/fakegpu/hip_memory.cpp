// The fake libamdhip64.so: devices, and memory of this and of other processes.
#include "hip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

using namespace fakehip;

// hipDeviceProp_tR0600, which is ABI. What lies between is left zero.
struct Properties {
  char name[256];
  char between[904];
  char architecture[256];
};

namespace fakehip {

const char* architecture() {
  const char* set = getenv("FAKEGPU_ARCHITECTURE");
  return set && *set ? set : "gfx942";
}

// A device that has failed fails all that follows.
hipError_t refusal(const char* call) {
  if (int code = injected(call)) return (hipError_t)code;
  return in_host_function() ? hipErrorIllegalState : (hipError_t)device_error(current);
}

std::shared_ptr<Stream> stream_of(void* handle) {
  return handle ? handles<Stream>().find(handle) : default_stream(current);
}

}  // namespace fakehip

static hipError_t allocated(void** pointer, size_t nbytes, Kind kind) {
  if (!pointer) return hipErrorInvalidValue;
  *pointer = (void*)allocate(current, nbytes, kind);
  return *pointer ? hipSuccess : hipErrorOutOfMemory;
}

// ---- devices ---------------------------------------------------------------------------------------------------------

CALL hipGetDeviceCount(int* count) {
  ENTER;
  *count = devices();
  return *count ? hipSuccess : hipErrorNoDevice;
}

CALL hipSetDevice(int device) {
  ENTER;
  if (device < 0 || device >= devices()) return hipErrorInvalidDevice;
  current = device;
  return hipSuccess;
}

CALL hipGetDevice(int* device) {
  ENTER;
  *device = current;
  return devices() ? hipSuccess : hipErrorNoDevice;
}

CALL hipDeviceGetName(char* name, int length, int device) {
  ENTER;
  if (device < 0 || device >= devices()) return hipErrorInvalidDevice;
  snprintf(name, length, "fake driver: no GPU");
  return hipSuccess;
}

CALL hipGetDevicePropertiesR0600(Properties* properties, int device) {
  ENTER;
  if (device < 0 || device >= devices()) return hipErrorInvalidDevice;
  memset(properties, 0, sizeof *properties);
  snprintf(properties->architecture, sizeof properties->architecture, "%s:sramecc+:xnack-", architecture());
  return hipSuccess;
}

CALL hipDeviceGetUuid(unsigned char* uuid, int device) {
  ENTER;
  if (device < 0 || device >= devices()) return hipErrorInvalidDevice;
  memset(uuid, 0, 16);
  uuid[0] = 0xfa;
  uuid[15] = (unsigned char)device;
  return hipSuccess;
}

CALL hipDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER;
  if (device < 0 || device >= devices() || peer < 0 || peer >= devices()) return hipErrorInvalidDevice;
  *can = device != peer && setting("FAKEGPU_PEERS", 1);
  return hipSuccess;
}

CALL hipDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER;
  if (device < 0 || device >= devices()) return hipErrorInvalidDevice;
  if (attribute != hipDeviceAttributeMultiprocessorCount) return hipErrorNotSupported;
  *value = multiprocessors();
  return hipSuccess;
}

// ---- memory ----------------------------------------------------------------------------------------------------------

CALL hipMalloc(void** pointer, size_t nbytes) {
  ENTER;
  return allocated(pointer, nbytes, Kind::DEVICE);
}

CALL hipExtMallocWithFlags(void** pointer, size_t nbytes, unsigned flags) {
  ENTER;
  return flags == hipDeviceMallocUncached ? allocated(pointer, nbytes, Kind::DEVICE) : hipErrorInvalidValue;
}

CALL hipHostMalloc(void** pointer, size_t nbytes, unsigned) {
  ENTER;
  return allocated(pointer, nbytes, Kind::HOST);
}

// Waits for the device, as the real one does.
CALL hipFree(void* pointer) {
  ENTER;
  synchronize_device(current);
  return release((uint64_t)pointer, Kind::DEVICE) ? hipSuccess : hipErrorInvalidDevicePointer;
}

CALL hipHostFree(void* pointer) {
  ENTER;
  synchronize_device(current);
  return release((uint64_t)pointer, Kind::HOST) ? hipSuccess : hipErrorInvalidValue;
}

CALL hipHostRegister(void* pointer, size_t nbytes, unsigned) {
  ENTER;
  if (!pointer || !nbytes) return hipErrorInvalidValue;
  return register_host((uint64_t)pointer, nbytes) ? hipSuccess : hipErrorHostMemoryAlreadyRegistered;
}

CALL hipHostUnregister(void* pointer) {
  ENTER;
  return release((uint64_t)pointer, Kind::REGISTERED) ? hipSuccess : hipErrorHostMemoryNotRegistered;
}

CALL hipHostGetDevicePointer(void** device, void* host, unsigned) {
  ENTER;
  auto block = find((uint64_t)host);
  if (!block || (block->kind != Kind::HOST && block->kind != Kind::REGISTERED)) return hipErrorInvalidValue;
  *device = host;
  return hipSuccess;
}

CALL hipMemGetAddressRange(void** base, size_t* nbytes, void* pointer) {
  ENTER;
  auto block = find((uint64_t)pointer);
  if (!block) return hipErrorNotFound;
  *base = (void*)block->address;
  *nbytes = block->nbytes;
  return hipSuccess;
}

CALL hipMemcpyAsync(void* to, const void* from, size_t nbytes, int kind, void* handle) {
  ENTER;
  auto stream = stream_of(handle);
  if (!stream) return hipErrorInvalidHandle;
  if (kind != hipMemcpyDefault) return hipErrorInvalidValue;
  stream->submit([=] { return copy((uint64_t)to, (uint64_t)from, nbytes) ? hipSuccess : hipErrorIllegalAddress; });
  return hipSuccess;
}

CALL hipMemsetAsync(void* to, int value, size_t nbytes, void* handle) {
  ENTER;
  auto stream = stream_of(handle);
  if (!stream) return hipErrorInvalidHandle;
  stream->submit([=] { return fill((uint64_t)to, (unsigned char)value, nbytes) ? hipSuccess : hipErrorIllegalAddress; });
  return hipSuccess;
}

// ---- memory of other processes ---------------------------------------------------------------------------------------

CALL hipIpcGetMemHandle(Handle* handle, void* pointer) {
  ENTER;
  return export_block((uint64_t)pointer, *handle) ? hipSuccess : hipErrorInvalidDevicePointer;
}

CALL hipIpcOpenMemHandle(void** pointer, Handle handle, unsigned) {
  ENTER;
  int owner = device_of(handle);
  if (owner >= 0 && owner != current && !setting("FAKEGPU_PEERS", 1)) return hipErrorPeerAccessUnsupported;
  uint64_t address;
  switch (open_block(handle, current, address)) {
    case Opened::OK: return *pointer = (void*)address, hipSuccess;
    case Opened::OWN_PROCESS: return hipErrorInvalidContext;
    case Opened::MALFORMED: return hipErrorInvalidValue;
    case Opened::GONE: break;
  }
  return hipErrorInvalidDevicePointer;
}

CALL hipIpcCloseMemHandle(void* pointer) {
  ENTER;
  return release((uint64_t)pointer, Kind::IMPORTED) ? hipSuccess : hipErrorInvalidDevicePointer;
}
