// What the files of the fake libcuda.so.1 share. Their signatures are checked by the compiler against NVIDIA's cuda.h.
#pragma once
#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

namespace fakecuda {

// A call as cuGetProcAddress knows it: by name, and the version that brought this form of it.
struct Symbol {
  const char* name;
  int version;
  void* function;
};
struct Symbols {
  Symbols(std::initializer_list<Symbol> added);
};
std::vector<Symbol>& symbols();

// Things behind the driver's handles. A handle that was destroyed, or never was one, is found out.
template <class T> class Handles {
 public:
  void* add(std::shared_ptr<T> thing) {
    std::lock_guard<std::mutex> guard(mutex_);
    void* handle = (void*)(0x1000 + 16 * ++made_);
    return things_[handle] = thing, handle;
  }
  std::shared_ptr<T> get(void* handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = things_.find(handle);
    return found == things_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> remove(void* handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = things_.find(handle);
    if (found == things_.end()) return nullptr;
    auto thing = found->second;
    return things_.erase(found), thing;
  }
  std::vector<std::shared_ptr<T>> all() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::shared_ptr<T>> things;
    for (auto& one : things_) things.push_back(one.second);
    return things;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<T>> things_;
  uintptr_t made_ = 0;
};

CUresult begin(const char* function);       // of every call; a code to answer at once, or success
CUresult need_context(const char* function);
CUresult need_no_capture();                 // calls that a capture forbids; they spoil it
int device();                               // of the current context
std::shared_ptr<fakegpu::Stream> stream(CUstream handle);  // null: no such stream. Handles 0 and 1: the default one
std::vector<std::shared_ptr<fakegpu::Graph>> captures();

}  // namespace fakecuda

// First in each call. Names that cuda.h maps to another (_v2) are logged and injected as the header spells them.
#define FAKE_CALL                                                                      \
  if (CUresult code = fakecuda::begin(__func__); code != CUDA_SUCCESS) return code
#define FAKE_CALL_IN_CONTEXT                                                           \
  if (CUresult code = fakecuda::need_context(__func__); code != CUDA_SUCCESS) return code
#define FAKE_CALL_OUTSIDE_CAPTURE                                                      \
  FAKE_CALL_IN_CONTEXT;                                                                \
  if (CUresult code = fakecuda::need_no_capture(); code != CUDA_SUCCESS) return code
#define FAKE_SYMBOL(NAME, VERSION) {#NAME, VERSION, (void*)NAME}
