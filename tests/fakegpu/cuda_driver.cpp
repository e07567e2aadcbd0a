// The fake libcuda.so.1: start, devices, contexts, errors, and how the bindings find calls.
#include "cuda_driver.h"

#include <stdio.h>
#include <string.h>

#include <atomic>
#include <string>

using fakegpu::setting;

namespace fakecuda {

std::vector<Symbol>& symbols() {
  static std::vector<Symbol>& all = *new std::vector<Symbol>;
  return all;
}

Symbols::Symbols(std::initializer_list<Symbol> added) { symbols().insert(symbols().end(), added); }

namespace {

enum { MOST_DEVICES = 16 };

struct Context {
  std::atomic<int> holders{0};
};
Context contexts[MOST_DEVICES];
thread_local Context* current = nullptr;
std::atomic<bool> initialised{false};

// cuMemAlloc_v2 is cuMemAlloc to whoever reads cuda.h.
std::string plain_name(const char* function) {
  std::string name = function;
  size_t at = name.rfind("_v");
  return at == std::string::npos ? name : name.substr(0, at);
}

}  // namespace

CUresult begin(const char* function) {
  if (int code = fakegpu::injected(plain_name(function).c_str())) return (CUresult)code;
  if (fakegpu::in_host_function()) return fakegpu::injected("refused"), CUDA_ERROR_NOT_PERMITTED;  // for the log
  return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult need_context(const char* function) {
  if (CUresult code = begin(function); code != CUDA_SUCCESS) return code;
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  if (!current->holders) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return (CUresult)fakegpu::device_error(device());
}

CUresult need_no_capture() {
  auto running = captures();
  for (auto& graph : running) graph->spoilt = true;
  return running.empty() ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

int device() { return (int)(current - contexts); }

static bool known(CUdevice device) { return device >= 0 && device < fakegpu::devices(); }

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

CUresult cuInit(unsigned flags) {
  if (int code = fakegpu::injected("cuInit")) return (CUresult)code;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (!fakegpu::devices()) return CUDA_ERROR_NO_DEVICE;
  initialised = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = (int)setting("FAKEGPU_CUDA_VERSION", 13000);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  FAKE_CALL;
  *count = fakegpu::devices();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CALL;
  if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  FAKE_CALL;
  if (!known(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, length, "fake GPU %d (no GPU, CPU threads)", device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  FAKE_CALL;
  if (!known(device)) return CUDA_ERROR_INVALID_DEVICE;
  memset(uuid, 0xfa, sizeof *uuid);
  uuid->bytes[15] = (char)device;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  FAKE_CALL;
  if (!known(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(id, length, "0000:%02x:00.0", device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* nbytes, CUdevice device) {
  FAKE_CALL;
  if (!known(device)) return CUDA_ERROR_INVALID_DEVICE;
  *nbytes = setting("FAKEGPU_MEMORY", 1 << 30);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  FAKE_CALL;
  if (!known(device)) return CUDA_ERROR_INVALID_DEVICE;
  const int capability = (int)setting("FAKEGPU_CAPABILITY", 90);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = fakegpu::multiprocessors(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = fakegpu::threads_of_multiprocessor(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *value = (int)setting("FAKEGPU_MULTICAST", 1); break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = (int)setting("FAKEGPU_VMM", 1); break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: *value = 1; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  FAKE_CALL;
  if (!known(device) || !known(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && setting("FAKEGPU_PEERS", 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  FAKE_CALL_IN_CONTEXT;
  if (flags || (Context*)peer == &contexts[device()]) return CUDA_ERROR_INVALID_VALUE;
  return setting("FAKEGPU_PEERS", 1) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_CALL;
  if (!known(device) || device >= MOST_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
  contexts[device].holders++;
  *context = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  FAKE_CALL;
  if (!known(device) || !contexts[device].holders) return CUDA_ERROR_INVALID_CONTEXT;
  contexts[device].holders--;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  FAKE_CALL;
  current = (Context*)context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  FAKE_CALL;
  *context = (CUcontext)current;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  FAKE_CALL_IN_CONTEXT;
  *device = fakecuda::device();
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  FAKE_CALL_OUTSIDE_CAPTURE;
  fakegpu::synchronize_device(device());
  return (CUresult)fakegpu::device_error(device());
}

CUresult cuGetErrorName(CUresult code, const char** name) {
  static const std::map<int, const char*> names = {
      {CUDA_SUCCESS, "CUDA_SUCCESS"},
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED"},
      {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
      {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED"},
  };
  static thread_local char other[40];
  auto found = names.find(code);
  snprintf(other, sizeof other, "CUDA_ERROR_%d", code);
  *name = found == names.end() ? other : found->second;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
  static thread_local char message[64];
  snprintf(message, sizeof message, "error %d of the fake driver", code);
  *text = message;
  return CUDA_SUCCESS;
}

// NVRTC looks here for what only NVIDIA's libraries know of each other, and does without.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

// The newest form that is no newer than the version asked for.
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  const Symbol* best = nullptr;
  bool newer = false;
  for (auto& symbol : symbols()) {
    if (strcmp(symbol.name, name)) continue;
    if (symbol.version > version) newer = true;
    else if (!best || symbol.version > best->version) best = &symbol;
  }
  *function = best ? best->function : nullptr;
  auto missing = newer ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (found) *found = best ? CU_GET_PROC_ADDRESS_SUCCESS : missing;
  return best ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"

static Symbols added({
    FAKE_SYMBOL(cuInit, 2000),
    FAKE_SYMBOL(cuDriverGetVersion, 2020),
    FAKE_SYMBOL(cuDeviceGetCount, 2000),
    FAKE_SYMBOL(cuDeviceGet, 2000),
    FAKE_SYMBOL(cuDeviceGetName, 2000),
    FAKE_SYMBOL(cuDeviceGetUuid, 11040),
    FAKE_SYMBOL(cuDeviceGetPCIBusId, 4010),
    FAKE_SYMBOL(cuDeviceTotalMem, 3020),
    FAKE_SYMBOL(cuDeviceGetAttribute, 2000),
    FAKE_SYMBOL(cuDeviceCanAccessPeer, 4000),
    FAKE_SYMBOL(cuCtxEnablePeerAccess, 4000),
    FAKE_SYMBOL(cuDevicePrimaryCtxRetain, 7000),
    FAKE_SYMBOL(cuDevicePrimaryCtxRelease, 11000),
    FAKE_SYMBOL(cuCtxSetCurrent, 4000),
    FAKE_SYMBOL(cuCtxGetCurrent, 4000),
    FAKE_SYMBOL(cuCtxGetDevice, 2000),
    FAKE_SYMBOL(cuCtxSynchronize, 2000),
    FAKE_SYMBOL(cuGetErrorName, 6000),
    FAKE_SYMBOL(cuGetErrorString, 6000),
    FAKE_SYMBOL(cuGetExportTable, 3000),
    FAKE_SYMBOL(cuGetProcAddress, 12000),
});
