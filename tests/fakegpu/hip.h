// What the parts of the fake libamdhip64.so share: the calls of the HIP runtime that commrt makes through hip-python, over
// device.h.
//
// Strict where HIP is: handles are looked up, memory of the own process can't be opened, code objects are real ones for the
// device's architecture, and their kernels' parameters those of the CPU build. FAKEGPU_ARCHITECTURE: gfx942 if unset.
#pragma once
#include <map>
#include <memory>
#include <mutex>

#include "device.h"

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

namespace fakehip {

using namespace fakegpu;

inline thread_local int current;  // the calling thread's device

const char* architecture();
hipError_t refusal(const char* call);           // what a call must answer before all else
std::shared_ptr<Stream> stream_of(void* handle);  // null: none

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

}  // namespace fakehip

#define CALL extern "C" __attribute__((visibility("default"))) hipError_t
#define ENTER if (hipError_t refused = refusal(__func__)) return refused
