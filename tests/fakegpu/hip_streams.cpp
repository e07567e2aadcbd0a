// The fake libamdhip64.so: streams, events, graphs and kernels.
#include <stdio.h>

#include "code_object.h"
#include "hip.h"

using namespace fakehip;

namespace {

struct Function {
  const Kernel* kernel;
  unsigned most_threads;
};

struct Executable {
  std::shared_ptr<Graph> graph;
};

bool same_parameters(const std::string& name, const DeviceKernel& device, const Kernel& host) {
  if (device.sizes == host.sizes) return true;
  fprintf(stderr, "fake HIP: %s takes %zu parameters in the code object, %zu in the CPU build, or of other sizes\n",
          name.c_str(), device.sizes.size(), host.sizes.size());
  return false;
}

}  // namespace

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
