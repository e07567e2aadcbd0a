// The fake libcuda.so.1: streams, events, host functions, and graphs captured from streams.
#include "cuda_driver.h"

using namespace fakecuda;
using fakegpu::Event;
using fakegpu::Graph;
using fakegpu::Stream;

namespace {

Handles<Stream>& all_streams = *new Handles<Stream>;
Handles<Event>& events = *new Handles<Event>;
Handles<Graph>& graphs = *new Handles<Graph>;
Handles<Graph>& executables = *new Handles<Graph>;

}  // namespace

namespace fakecuda {

std::shared_ptr<Stream> stream(CUstream handle) {
  return (uintptr_t)handle <= 1 ? fakegpu::default_stream(device()) : all_streams.get(handle);
}

// Counts as running until it is ended, spoilt or not.
std::vector<std::shared_ptr<Graph>> captures() {
  std::vector<std::shared_ptr<Graph>> running;
  for (auto& stream : all_streams.all())
    if (auto graph = stream->capture()) running.push_back(graph);
  return running;
}

}  // namespace fakecuda

extern "C" {

CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
  FAKE_CALL_IN_CONTEXT;
  if (flags & ~CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  *handle = (CUstream)all_streams.add(Stream::create(device(), !(flags & CU_STREAM_NON_BLOCKING)));
  return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int) { return cuStreamCreate(handle, flags); }

CUresult cuStreamDestroy(CUstream handle) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = all_streams.remove(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  stream->close();
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = fakecuda::stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture()) return need_no_capture();
  stream->synchronize();
  return (CUresult)fakegpu::device_error(device());
}

CUresult cuStreamQuery(CUstream handle) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = fakecuda::stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture()) return need_no_capture();
  return stream->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = fakecuda::stream(handle);
  auto awaited = events.get(event);
  if (!stream || !awaited) return CUDA_ERROR_INVALID_HANDLE;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  auto capture = stream->capture();
  if (capture && awaited->stream && awaited->graph != capture) return capture->spoilt = true, CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  fakegpu::wait_event(*stream, *awaited);
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  FAKE_CALL_IN_CONTEXT;
  if (flags & ~(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)) return CUDA_ERROR_INVALID_VALUE;
  *handle = (CUevent)events.add(std::make_shared<Event>());
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
  FAKE_CALL_IN_CONTEXT;
  return events.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
  FAKE_CALL_IN_CONTEXT;
  auto event = events.get(handle);
  auto at = fakecuda::stream(stream);
  if (!event || !at) return CUDA_ERROR_INVALID_HANDLE;
  fakegpu::record(*event, *at);
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  FAKE_CALL_IN_CONTEXT;
  auto event = events.get(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->graph) return CUDA_ERROR_CAPTURED_EVENT;
  return fakegpu::passed(*event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  FAKE_CALL_IN_CONTEXT;
  auto event = events.get(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->graph) return CUDA_ERROR_CAPTURED_EVENT;
  fakegpu::wait(*event);
  return (CUresult)fakegpu::device_error(device());
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = fakecuda::stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!function) return CUDA_ERROR_INVALID_VALUE;
  stream->submit(fakegpu::host_function([=] { function(argument); }));
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void* argument, unsigned) {
  return cuLaunchHostFunc(stream, function, argument);
}

// Whatever the mode, calls are refused as the strictest refuses them.
CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode) {
  FAKE_CALL_IN_CONTEXT;
  if ((uintptr_t)handle <= 1) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  auto stream = all_streams.get(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture()) return CUDA_ERROR_ILLEGAL_STATE;
  stream->begin_capture();
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = fakecuda::stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  auto graph = stream->capture();
  if (!graph) *status = CU_STREAM_CAPTURE_STATUS_NONE;
  else *status = graph->spoilt ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  FAKE_CALL_IN_CONTEXT;
  auto stream = all_streams.get(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!stream->capture()) return CUDA_ERROR_ILLEGAL_STATE;
  auto captured = stream->end_capture();
  *graph = captured->spoilt ? nullptr : (CUgraph)graphs.add(captured);
  return captured->spoilt ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec* handle, CUgraph graph, unsigned long long) {
  FAKE_CALL_IN_CONTEXT;
  auto captured = graphs.get(graph);
  if (!captured) return CUDA_ERROR_INVALID_VALUE;
  *handle = (CUgraphExec)executables.add(std::make_shared<Graph>(*captured));
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
  FAKE_CALL_IN_CONTEXT;
  auto graph = executables.get(handle);
  auto at = fakecuda::stream(stream);
  if (!graph || !at) return CUDA_ERROR_INVALID_VALUE;
  fakegpu::launch_graph(*at, graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
  FAKE_CALL_IN_CONTEXT;
  return graphs.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  FAKE_CALL_IN_CONTEXT;
  return executables.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"

static Symbols added({
    FAKE_SYMBOL(cuStreamCreate, 2000),
    FAKE_SYMBOL(cuStreamCreateWithPriority, 5050),
    FAKE_SYMBOL(cuStreamDestroy, 4000),
    FAKE_SYMBOL(cuStreamSynchronize, 2000),
    FAKE_SYMBOL(cuStreamQuery, 2000),
    FAKE_SYMBOL(cuStreamWaitEvent, 3020),
    FAKE_SYMBOL(cuEventCreate, 2000),
    FAKE_SYMBOL(cuEventDestroy, 4000),
    FAKE_SYMBOL(cuEventRecord, 2000),
    FAKE_SYMBOL(cuEventQuery, 2000),
    FAKE_SYMBOL(cuEventSynchronize, 2000),
    FAKE_SYMBOL(cuLaunchHostFunc, 10000),
    {"cuLaunchHostFunc", 13020, (void*)cuLaunchHostFunc_v2},
    FAKE_SYMBOL(cuStreamBeginCapture, 10010),
    FAKE_SYMBOL(cuStreamIsCapturing, 10000),
    FAKE_SYMBOL(cuStreamEndCapture, 10000),
    {"cuGraphInstantiateWithFlags", 11040, (void*)cuGraphInstantiate},
    FAKE_SYMBOL(cuGraphLaunch, 10000),
    FAKE_SYMBOL(cuGraphDestroy, 10000),
    FAKE_SYMBOL(cuGraphExecDestroy, 10000),
});
