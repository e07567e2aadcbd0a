// A GPU that is not there: memory, streams, events, kernels and graphs, for test-only driver libraries.
//
// cuda_*.cpp and hip_*.cpp turn a vendor's calls into these; what ran here ran on no GPU, and tests say so. Kernels are the
// same source compiled for the CPU, each thread block an OS thread of its own. A driver library does, in each call:
//
//   if (int code = fakegpu::injected("cuMemAlloc")) return (CUresult)code;      // counts and logs the call
//   uint64_t address = fakegpu::allocate(device, nbytes, Kind::DEVICE);         // 0: no memory left
//   stream->submit([=] { return fakegpu::copy(to, from, nbytes) ? 0 : MY_ILLEGAL_ADDRESS; });
//   launch(*stream, *find_kernel("name"), blocks, threads, arguments);          // arguments copied by the caller
//
// What is real: order in streams, overlap between them, residency (a block waits until a multiprocessor has room for it,
// so two half-resident grids can wait for each other), memory that processes share, use after free (an error in calls, a
// fault in kernels). What is not: host code that reads device memory plainly is not caught.
//
// The environment, read once:
//   FAKEGPU_DEVICES=2              devices
//   FAKEGPU_MULTIPROCESSORS=8      of each device
//   FAKEGPU_THREADS=2048           that a multiprocessor holds
//   FAKEGPU_MEMORY=1073741824      bytes of each device, for each process
//   FAKEGPU_VMM=1                  CUDA: memory is made and mapped piece by piece
//   FAKEGPU_MULTICAST=1            CUDA: multicast objects are supported
//   FAKEGPU_KERNELS=FOLDER         *.so, made by `kernels()` of the Python package; a kernel is found by its name
//   FAKEGPU_FAIL=NAME:CODE[@N],... call NAME answers CODE: the Nth time, or always. NAME "kernel": a grid, while it runs.
//                                  fakegpu_fail(text) of the library says something else from then on
//   FAKEGPU_LOG=FILE               one line a call: process and name
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fakegpu {

long setting(const char* name, long otherwise);
int devices();
int multiprocessors();
int threads_of_multiprocessor();

// The code that this call must answer, or 0. Call it first in every driver function.
int injected(const char* call);

// ---- memory ----------------------------------------------------------------------------------------------------------

// MAPPED and MULTICAST: noted by a driver that maps memory piece by piece; only multimem instructions reach the latter.
enum class Kind { DEVICE, HOST, REGISTERED, IMPORTED, MAPPED, MULTICAST };

struct Block {
  uint64_t address;
  size_t nbytes;   // as asked for
  Kind kind;
  int device;
  int fd;          // -1: none behind it
  size_t offset;   // of `address` in the file
  int holders;     // IMPORTED: how often it was opened
};

// Filled with garbage. DEVICE memory of less than 2 MiB is aligned to 512 bytes only, as drivers cut it from larger pieces.
uint64_t allocate(int device, size_t nbytes, Kind kind);
bool release(uint64_t address, Kind kind);             // false: no such block begins there
std::optional<Block> find(uint64_t address);           // the live block that holds that address
bool holds(uint64_t address, size_t nbytes);           // whether one live block holds all of it
bool register_host(uint64_t address, size_t nbytes);   // false: overlaps what is registered or allocated already
void note_block(uint64_t address, size_t nbytes, Kind kind, int device);
void forget_block(uint64_t address);
size_t free_nbytes(int device);

struct Handle { char bytes[64]; };
enum class Opened { OK, MALFORMED, OWN_PROCESS, GONE };
bool export_block(uint64_t address, Handle& handle);   // of the whole block; false: no DEVICE block holds that address
Opened open_block(const Handle& handle, int device, uint64_t& address);  // once more: the same address, one holder more
int device_of(const Handle& handle);                   // of its owner; -1: malformed

// Device to device, host to device and back. False if either end is in a device's memory range and freed or too short.
bool copy(uint64_t to, uint64_t from, size_t nbytes);
bool fill(uint64_t to, unsigned char value, size_t nbytes);

// ---- streams ---------------------------------------------------------------------------------------------------------

using Work = std::function<int()>;  // 0, or the vendor's error code, which stays with the stream and the device

struct Graph {
  std::vector<Work> nodes;  // in an order in which they may run
  bool spoilt = false;      // by a call that a capture forbids
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // Its thread lives until close, and until all that was queued is done.
  static std::shared_ptr<Stream> create(int device, bool waits_for_default);

  uint64_t submit(Work work);      // its ticket; while a capture is on, it is recorded instead
  bool reached(uint64_t ticket);
  void wait(uint64_t ticket);
  bool idle();
  void synchronize();
  int error();                     // the first of its work
  void close();

  void begin_capture();                            // a capture of its own
  void join_capture(std::shared_ptr<Graph> graph); // an event recorded in that capture was waited for
  std::shared_ptr<Graph> capture();                // null: none
  std::shared_ptr<Graph> end_capture();

  const int device;
  const bool waits_for_default;

 private:
  Stream(int device, bool waits_for_default);
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  uint64_t submitted_ = 0, finished_ = 0;
  int error_ = 0;
  bool closed_ = false;
  std::shared_ptr<Graph> capture_;
};

struct Event {
  std::shared_ptr<Stream> stream;  // null: never recorded
  uint64_t ticket = 0;
  std::shared_ptr<Graph> graph;    // recorded in a capture
};

void record(Event& event, Stream& stream);
bool passed(const Event& event);
void wait(const Event& event);
void wait_event(Stream& stream, const Event& event);  // what is queued from now on waits
void launch_graph(Stream& stream, std::shared_ptr<Graph> graph);

std::shared_ptr<Stream> default_stream(int device);   // made at first use; others that wait for it are ordered with it
void synchronize_device(int device);                  // all its streams, as freeing memory does
int device_error(int device);                         // the first of all work on it: it has no end, as on a GPU

// Host functions: one at a time in a process, as a driver may do. Inside of one, driver calls must be refused.
Work host_function(std::function<void()> function);
bool in_host_function();

// ---- kernels ---------------------------------------------------------------------------------------------------------

struct Kernel {
  std::string name;
  void (*call)(void** arguments);
  void (*enter)(unsigned block, unsigned blocks);
  std::vector<unsigned> sizes;  // of its parameters, in bytes
};

using Arguments = std::vector<std::vector<char>>;

// Where the member-th memory behind a multicast address lies in this process; null: there are no more. Set by a driver.
using Multicast = void* (*)(const void* address, unsigned member);
extern Multicast multicast;

const Kernel* find_kernel(const std::string& name);    // null: no file in FAKEGPU_KERNELS defines it
Arguments copy_arguments(const Kernel& kernel, void** pointers);
int resident_blocks(unsigned threads);                 // of a multiprocessor
void launch(Stream& stream, const Kernel& kernel, unsigned blocks, unsigned threads, Arguments arguments);

}  // namespace fakegpu
