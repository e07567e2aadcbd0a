// A test-only libamdhip64.so: the calls of the HIP runtime that commrt makes through hip-python, over device.h.
//
// Strict where HIP is: handles are looked up, memory of the own process can't be opened, code objects are real ones for the
// device's architecture, and their kernels' parameters those of the CPU build. FAKEGPU_ARCHITECTURE: gfx942 if unset.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <memory>
#include <mutex>

#include "code_object.h"
#include "device.h"

using namespace fakegpu;

// As in hip_runtime_api.h; a test compares them with the bindings' numbers.
enum hipError_t {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorInvalidConfiguration = 9,
  hipErrorInvalidDevicePointer = 17,
  hipErrorNoDevice = 100,
  hipErrorInvalidDevice = 101,
  hipErrorInvalidImage = 200,
  hipErrorInvalidContext = 201,
  hipErrorNoBinaryForGpu = 209,
  hipErrorPeerAccessUnsupported = 217,
  hipErrorInvalidHandle = 400,
  hipErrorIllegalState = 401,
  hipErrorNotFound = 500,
  hipErrorNotReady = 600,
  hipErrorIllegalAddress = 700,
  hipErrorHostMemoryAlreadyRegistered = 712,
  hipErrorHostMemoryNotRegistered = 713,
  hipErrorNotSupported = 801,
  hipErrorStreamCaptureUnsupported = 900,
  hipErrorStreamCaptureInvalidated = 901,
  hipErrorStreamCaptureIsolation = 905,
  hipErrorCapturedEvent = 907,
};
enum { hipMemcpyDefault = 4, hipDeviceAttributeMultiprocessorCount = 63, hipStreamNonBlocking = 1, hipDeviceMallocUncached = 3 };

// hipDeviceProp_tR0600, which is ABI. What lies between is left zero.
struct Properties {
  char name[256];
  char between[904];
  char architecture[256];
};

namespace {

thread_local int current;

const char* architecture() {
  const char* set = getenv("FAKEGPU_ARCHITECTURE");
  return set && *set ? set : "gfx942";
}

struct Function {
  const Kernel* kernel;
  unsigned most_threads;
};

struct Executable {
  std::shared_ptr<Graph> graph;
};

// Things that a program holds by a handle. Never destroyed: stream threads outlive main.
template <class T> class Handles {
 public:
  void* add(std::shared_ptr<T> thing) {
    std::lock_guard<std::mutex> guard(mutex_);
    void* handle = thing.get();
    live_[handle] = std::move(thing);
    return handle;
  }
  std::shared_ptr<T> find(void* handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = live_.find(handle);
    return found == live_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> take(void* handle) {
    auto found = find(handle);
    std::lock_guard<std::mutex> guard(mutex_);
    live_.erase(handle);
    return found;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<T>> live_;
};

template <class T> Handles<T>& handles() {
  static Handles<T>& only = *new Handles<T>;
  return only;
}

std::shared_ptr<Stream> stream_of(void* handle) {
  return handle ? handles<Stream>().find(handle) : default_stream(current);
}

hipError_t allocated(void** pointer, size_t nbytes, Kind kind) {
  if (!pointer) return hipErrorInvalidValue;
  *pointer = (void*)allocate(current, nbytes, kind);
  return *pointer ? hipSuccess : hipErrorOutOfMemory;
}

// A device that has failed fails all that follows.
hipError_t refusal(const char* call) {
  if (int code = injected(call)) return (hipError_t)code;
  return in_host_function() ? hipErrorIllegalState : (hipError_t)device_error(current);
}

bool same_parameters(const std::string& name, const DeviceKernel& device, const Kernel& host) {
  if (device.sizes == host.sizes) return true;
  fprintf(stderr, "fake HIP: %s takes %zu parameters in the code object, %zu in the CPU build, or of other sizes\n",
          name.c_str(), device.sizes.size(), host.sizes.size());
  return false;
}

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) hipError_t
#define ENTER if (hipError_t refused = refusal(__func__)) return refused

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

// ---- streams and events ----------------------------------------------------------------------------------------------

CALL hipStreamCreateWithFlags(void** stream, unsigned flags) {
  ENTER;
  *stream = handles<Stream>().add(Stream::create(current, flags != hipStreamNonBlocking));
  return hipSuccess;
}

CALL hipStreamDestroy(void* handle) {
  ENTER;
  auto stream = handles<Stream>().take(handle);
  if (!stream) return hipErrorInvalidHandle;
  stream->close();
  return hipSuccess;
}

CALL hipStreamSynchronize(void* handle) {
  ENTER;
  auto stream = stream_of(handle);
  if (!stream) return hipErrorInvalidHandle;
  if (auto graph = stream->capture()) return graph->spoilt = true, hipErrorStreamCaptureUnsupported;
  stream->synchronize();
  return (hipError_t)device_error(current);
}

CALL hipStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  ENTER;
  auto stream = stream_of(handle);
  auto event = handles<Event>().find(event_handle);
  if (!stream || !event) return hipErrorInvalidHandle;
  auto graph = stream->capture();
  if (graph && event->graph != graph) return graph->spoilt = true, hipErrorStreamCaptureIsolation;
  wait_event(*stream, *event);
  return hipSuccess;
}

CALL hipLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  ENTER;
  auto stream = stream_of(handle);
  if (!stream || !function) return hipErrorInvalidValue;
  stream->submit(host_function([=] { function(argument); }));
  return hipSuccess;
}

CALL hipEventCreateWithFlags(void** event, unsigned) {
  ENTER;
  *event = handles<Event>().add(std::make_shared<Event>());
  return hipSuccess;
}

CALL hipEventDestroy(void* handle) {
  ENTER;
  return handles<Event>().take(handle) ? hipSuccess : hipErrorInvalidHandle;
}

CALL hipEventRecord(void* handle, void* stream_handle) {
  ENTER;
  auto event = handles<Event>().find(handle);
  auto stream = stream_of(stream_handle);
  if (!stream || !event) return hipErrorInvalidHandle;
  record(*event, *stream);
  return hipSuccess;
}

CALL hipEventQuery(void* handle) {
  ENTER;
  auto event = handles<Event>().find(handle);
  if (!event) return hipErrorInvalidHandle;
  if (event->graph) return hipErrorCapturedEvent;
  return passed(*event) ? hipSuccess : hipErrorNotReady;
}

CALL hipEventSynchronize(void* handle) {
  ENTER;
  auto event = handles<Event>().find(handle);
  if (!event) return hipErrorInvalidHandle;
  if (event->graph) return hipErrorCapturedEvent;
  wait(*event);
  return (hipError_t)device_error(current);
}

// ---- graphs ----------------------------------------------------------------------------------------------------------

CALL hipStreamBeginCapture(void* handle, int) {
  ENTER;
  auto stream = handles<Stream>().find(handle);
  if (!stream) return hipErrorStreamCaptureUnsupported;
  if (stream->capture()) return hipErrorIllegalState;
  stream->begin_capture();
  return hipSuccess;
}

CALL hipStreamIsCapturing(void* handle, int* status) {
  ENTER;
  auto stream = stream_of(handle);
  if (!stream) return hipErrorInvalidHandle;
  auto graph = stream->capture();
  *status = !graph ? 0 : graph->spoilt ? 2 : 1;
  return hipSuccess;
}

CALL hipStreamEndCapture(void* handle, void** graph) {
  ENTER;
  auto stream = handles<Stream>().find(handle);
  if (!stream) return hipErrorInvalidHandle;
  if (!stream->capture()) return hipErrorIllegalState;
  auto captured = stream->end_capture();
  *graph = captured->spoilt ? nullptr : handles<Graph>().add(captured);
  return captured->spoilt ? hipErrorStreamCaptureInvalidated : hipSuccess;
}

CALL hipGraphInstantiateWithFlags(void** executable, void* handle, unsigned long long) {
  ENTER;
  auto graph = handles<Graph>().find(handle);
  if (!graph) return hipErrorInvalidValue;
  *executable = handles<Executable>().add(std::make_shared<Executable>(Executable{graph}));
  return hipSuccess;
}

CALL hipGraphLaunch(void* handle, void* stream_handle) {
  ENTER;
  auto executable = handles<Executable>().find(handle);
  auto stream = stream_of(stream_handle);
  if (!executable || !stream) return hipErrorInvalidHandle;
  launch_graph(*stream, executable->graph);
  return hipSuccess;
}

CALL hipGraphDestroy(void* handle) {
  ENTER;
  return handles<Graph>().take(handle) ? hipSuccess : hipErrorInvalidValue;
}

CALL hipGraphExecDestroy(void* handle) {
  ENTER;
  return handles<Executable>().take(handle) ? hipSuccess : hipErrorInvalidValue;
}

// ---- kernels ---------------------------------------------------------------------------------------------------------

CALL hipModuleLoadData(void** module, const void* image) {
  ENTER;
  auto code = read_code_object(image);
  if (!code) return hipErrorInvalidImage;
  if (code->target != std::string("amdgcn-amd-amdhsa--") + architecture()) return hipErrorNoBinaryForGpu;
  *module = handles<CodeObject>().add(std::make_shared<CodeObject>(*code));
  return hipSuccess;
}

CALL hipModuleGetFunction(void** function, void* module, const char* name) {
  ENTER;
  auto code = handles<CodeObject>().find(module);
  if (!code) return hipErrorInvalidHandle;
  auto device = code->kernels.find(name);
  if (device == code->kernels.end()) return hipErrorNotFound;
  const Kernel* host = find_kernel(name);
  if (!host || !same_parameters(name, device->second, *host)) return hipErrorInvalidImage;
  *function = handles<Function>().add(std::make_shared<Function>(Function{host, device->second.most_threads}));
  return hipSuccess;
}

CALL hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* handle, int threads, size_t) {
  ENTER;
  if (!handles<Function>().find(handle)) return hipErrorInvalidHandle;
  *blocks = resident_blocks((unsigned)threads);
  return hipSuccess;
}

CALL hipModuleLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned, void* stream_handle, void** parameters,
                           void** extra) {
  ENTER;
  auto function = handles<Function>().find(handle);
  auto stream = stream_of(stream_handle);
  if (!function || !stream) return hipErrorInvalidHandle;
  if (!parameters || extra) return hipErrorInvalidValue;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return hipErrorNotSupported;
  if (!grid_x || !block_x || block_x > function->most_threads) return hipErrorInvalidConfiguration;
  launch(*stream, *function->kernel, grid_x, block_x, copy_arguments(*function->kernel, parameters));
  return hipSuccess;
}
