#include "device.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>

namespace fakegpu {

namespace {

// Never destroyed: stream threads outlive main.
template <class T> T& forever() {
  static T& only = *new T;
  return only;
}

using Guard = std::lock_guard<std::mutex>;

}  // namespace

// ---- the environment -------------------------------------------------------------------------------------------------

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

int devices() {
  static const int count = (int)setting("FAKEGPU_DEVICES", 2);
  return count;
}

int multiprocessors() {
  static const int count = (int)setting("FAKEGPU_MULTIPROCESSORS", 8);
  return count;
}

int threads_of_multiprocessor() {
  static const int count = (int)setting("FAKEGPU_THREADS", 2048);
  return count;
}

namespace {

struct Fault { int code; long nth; };  // nth 0: always

std::map<std::string, Fault> parse_faults(const char* text) {
  std::map<std::string, Fault> faults;
  std::string rest = text ? text : "";
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    std::string one = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    char name[64];
    Fault fault{0, 0};
    if (sscanf(one.c_str(), "%63[^:]:%d@%ld", name, &fault.code, &fault.nth) >= 2) faults[name] = fault;
    else fprintf(stderr, "fakegpu: FAKEGPU_FAIL: can't read %s\n", one.c_str());
  }
  return faults;
}

void log_call(const char* call) {
  static const char* path = getenv("FAKEGPU_LOG");
  if (!path) return;
  static const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  char line[128];
  int n = snprintf(line, sizeof line, "%d %s\n", getpid(), call);
  if (write(fd, line, n) != n) abort();
}

}  // namespace

namespace {

struct Faults {
  std::mutex mutex;
  std::map<std::string, Fault> planned = parse_faults(getenv("FAKEGPU_FAIL"));
  std::map<std::string, long> counts;
};

}  // namespace

int injected(const char* call) {
  log_call(call);
  Faults& faults = forever<Faults>();
  Guard guard(faults.mutex);
  auto found = faults.planned.find(call);
  if (found == faults.planned.end()) return 0;
  long count = ++faults.counts[call];
  return !found->second.nth || found->second.nth == count ? found->second.code : 0;
}

// From now on, in the place of what the environment says; calls are counted anew. For ctypes.
extern "C" void fakegpu_fail(const char* text) {
  Faults& faults = forever<Faults>();
  Guard guard(faults.mutex);
  faults.planned = parse_faults(text);
  faults.counts.clear();
}

// ---- memory ----------------------------------------------------------------------------------------------------------

namespace {

const size_t PAGE = 4096, LARGE = 2 << 20, SMALL_ALIGNMENT = 512;
const uint64_t MAGIC = 0xfa4e6b0full;

struct Mapping { uint64_t address; size_t nbytes; };

struct Memories {
  std::mutex mutex;
  std::map<uint64_t, Block> live;
  std::map<uint64_t, Mapping> mappings;  // by the address of their block
  std::map<uint64_t, size_t> dead;       // what was unmapped, and stays reserved so that its use is seen
  std::map<int, size_t> used;
  std::map<std::string, uint64_t> opened;
};

Memories& memories() { return forever<Memories>(); }

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// A mapping at an address that is a multiple of LARGE.
void* map_aligned(size_t nbytes, int fd) {
  size_t room = nbytes + LARGE;
  char* reserved = (char*)mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  char* at = (char*)round_up((uint64_t)reserved, LARGE);
  if (at > reserved) munmap(reserved, at - reserved);
  munmap(at + nbytes, reserved + room - (at + nbytes));
  if (mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return nullptr;
  return at;
}

void put_garbage(char* at, size_t nbytes) {
  size_t end = std::min(nbytes, (size_t)LARGE);
  memset(at, 0xcd, end);
  memset(at + nbytes - end, 0xcd, end);
}

const Block* live_at(Memories& m, uint64_t address) {
  auto next = m.live.upper_bound(address);
  if (next == m.live.begin()) return nullptr;
  const Block& block = std::prev(next)->second;
  return address < block.address + block.nbytes ? &block : nullptr;
}

bool dead_at(Memories& m, uint64_t address) {
  auto next = m.dead.upper_bound(address);
  if (next == m.dead.begin()) return false;
  auto& range = *std::prev(next);
  return address < range.first + range.second;
}

void bury(Memories& m, uint64_t address) {
  Mapping mapping = m.mappings[address];
  mmap((void*)mapping.address, mapping.nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  m.dead[mapping.address] = mapping.nbytes;
  m.mappings.erase(address);
  close(m.live[address].fd);
  m.live.erase(address);
}

struct Contents {  // of a Handle
  uint64_t magic;
  int32_t pid, fd;
  uint64_t inode, nbytes, offset, device;
};
static_assert(sizeof(Contents) <= sizeof(Handle), "a handle is 64 bytes");

}  // namespace

size_t free_nbytes(int device) {
  static const size_t all = setting("FAKEGPU_MEMORY", 1 << 30);
  Guard guard(memories().mutex);
  size_t used = memories().used[device];
  return used < all ? all - used : 0;
}

uint64_t allocate(int device, size_t nbytes, Kind kind) {
  size_t offset = kind == Kind::DEVICE && nbytes % LARGE ? SMALL_ALIGNMENT : 0;
  size_t mapped = round_up(nbytes + offset, PAGE);
  if (nbytes > free_nbytes(device)) return 0;
  int fd = memfd_create("fakegpu", MFD_CLOEXEC);
  if (fd < 0) return 0;
  char* at = ftruncate(fd, mapped) ? nullptr : (char*)map_aligned(mapped, fd);
  if (!at) return close(fd), 0;
  put_garbage(at, mapped);
  Memories& m = memories();
  Guard guard(m.mutex);
  uint64_t address = (uint64_t)at + offset;
  m.live[address] = {address, nbytes, kind, device, fd, offset, 1};
  m.mappings[address] = {(uint64_t)at, mapped};
  m.used[device] += nbytes;
  return address;
}

bool release(uint64_t address, Kind kind) {
  Memories& m = memories();
  Guard guard(m.mutex);
  auto found = m.live.find(address);
  if (found == m.live.end() || found->second.kind != kind) return false;
  if (--found->second.holders) return true;
  if (kind == Kind::REGISTERED) return m.live.erase(found), true;
  if (kind != Kind::IMPORTED) m.used[found->second.device] -= found->second.nbytes;
  for (auto it = m.opened.begin(); it != m.opened.end();) it = it->second == address ? m.opened.erase(it) : std::next(it);
  return bury(m, address), true;
}

std::optional<Block> find(uint64_t address) {
  Memories& m = memories();
  Guard guard(m.mutex);
  const Block* block = live_at(m, address);
  return block ? std::optional<Block>(*block) : std::nullopt;
}

bool holds(uint64_t address, size_t nbytes) {
  auto block = find(address);
  return block && nbytes <= block->nbytes - (address - block->address);
}

void note_block(uint64_t address, size_t nbytes, Kind kind, int device) {
  Guard guard(memories().mutex);
  memories().live[address] = {address, nbytes, kind, device, -1, 0, 1};
}

void forget_block(uint64_t address) {
  Guard guard(memories().mutex);
  memories().live.erase(address);
}

bool register_host(uint64_t address, size_t nbytes) {
  Memories& m = memories();
  Guard guard(m.mutex);
  auto next = m.live.lower_bound(address);
  if (live_at(m, address) || (next != m.live.end() && next->first < address + nbytes)) return false;
  m.live[address] = {address, nbytes, Kind::REGISTERED, 0, -1, 0, 1};
  return true;
}

bool export_block(uint64_t address, Handle& handle) {
  auto block = find(address);
  struct stat file;
  if (!block || block->kind != Kind::DEVICE || fstat(block->fd, &file)) return false;
  Contents contents{MAGIC, getpid(), block->fd, (uint64_t)file.st_ino, block->nbytes, block->offset, (uint64_t)block->device};
  memset(&handle, 0, sizeof handle);
  memcpy(&handle, &contents, sizeof contents);
  return true;
}

Opened open_block(const Handle& handle, int device, uint64_t& address) {
  Contents contents;
  memcpy(&contents, &handle, sizeof contents);
  if (contents.magic != MAGIC) return Opened::MALFORMED;
  if (contents.pid == getpid()) return Opened::OWN_PROCESS;
  Memories& m = memories();
  Guard guard(m.mutex);
  std::string key(handle.bytes, sizeof handle.bytes);
  auto known = m.opened.find(key);
  if (known != m.opened.end()) return address = known->second, m.live[address].holders++, Opened::OK;
  std::string path = "/proc/" + std::to_string(contents.pid) + "/fd/" + std::to_string(contents.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat file;
  if (fd < 0) return Opened::GONE;
  size_t mapped = round_up(contents.nbytes + contents.offset, PAGE);
  bool same = !fstat(fd, &file) && file.st_ino == contents.inode && (size_t)file.st_size == mapped;
  void* at = same ? map_aligned(mapped, fd) : nullptr;
  if (!at) return close(fd), Opened::GONE;
  address = (uint64_t)at + contents.offset;
  m.live[address] = {address, contents.nbytes, Kind::IMPORTED, device, fd, contents.offset, 1};
  m.mappings[address] = {(uint64_t)at, mapped};
  m.opened[key] = address;
  return Opened::OK;
}

int device_of(const Handle& handle) {
  Contents contents;
  memcpy(&contents, &handle, sizeof contents);
  return contents.magic == MAGIC ? (int)contents.device : -1;
}

namespace {

bool usable(uint64_t address, size_t nbytes) {
  Memories& m = memories();
  Guard guard(m.mutex);
  const Block* block = live_at(m, address);
  if (!block) return !dead_at(m, address);
  return block->kind != Kind::MULTICAST && nbytes <= block->nbytes - (address - block->address);
}

}  // namespace

bool copy(uint64_t to, uint64_t from, size_t nbytes) {
  if (!usable(to, nbytes) || !usable(from, nbytes)) return false;
  return memmove((void*)to, (const void*)from, nbytes), true;
}

bool fill(uint64_t to, unsigned char value, size_t nbytes) {
  if (!usable(to, nbytes)) return false;
  return memset((void*)to, value, nbytes), true;
}

// ---- streams ---------------------------------------------------------------------------------------------------------

namespace {

struct Streams {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Stream>> defaults;
  std::vector<std::weak_ptr<Stream>> others;
  std::map<int, int> errors;
};

Streams& streams() { return forever<Streams>(); }

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  Guard guard(streams().mutex);
  std::vector<std::shared_ptr<Stream>> found;
  if (streams().defaults.count(device)) found.push_back(streams().defaults[device]);
  for (auto& weak : streams().others)
    if (auto stream = weak.lock())
      if (stream->device == device) found.push_back(stream);
  return found;
}

bool is_default(const Stream& stream) {
  Guard guard(streams().mutex);
  auto found = streams().defaults.find(stream.device);
  return found != streams().defaults.end() && found->second.get() == &stream;
}

}  // namespace

static void note_error(int device, int code) {
  Guard guard(streams().mutex);
  streams().errors.emplace(device, code);
}

int device_error(int device) {
  Guard guard(streams().mutex);
  auto found = streams().errors.find(device);
  return found == streams().errors.end() ? 0 : found->second;
}

Stream::Stream(int device, bool waits_for_default) : device(device), waits_for_default(waits_for_default) {}

std::shared_ptr<Stream> Stream::create(int device, bool waits_for_default) {
  std::shared_ptr<Stream> stream(new Stream(device, waits_for_default));
  std::thread([stream] { stream->serve(); }).detach();
  Guard guard(streams().mutex);
  streams().others.push_back(stream);
  return stream;
}

void Stream::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    int code = work();
    work = nullptr;
    if (code) note_error(device, code);
    lock.lock();
    if (code && !error_) error_ = code;
    finished_++;
    changed_.notify_all();
  }
}

uint64_t Stream::submit(Work work) {
  std::vector<Event> before;  // what the default stream is ordered with
  if (is_default(*this)) {
    for (auto& other : streams_of(device))
      if (other.get() != this && other->waits_for_default) record(before.emplace_back(), *other);
  } else if (waits_for_default) {
    record(before.emplace_back(), *default_stream(device));
  }
  Guard guard(mutex_);
  if (capture_) return capture_->nodes.push_back(std::move(work)), submitted_;
  queue_.push_back([before, work] {
    for (auto& event : before) fakegpu::wait(event);
    return work();
  });
  changed_.notify_all();
  return ++submitted_;
}

bool Stream::reached(uint64_t ticket) {
  Guard guard(mutex_);
  return finished_ >= ticket;
}

void Stream::wait(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished_ >= ticket; });
}

bool Stream::idle() {
  Guard guard(mutex_);
  return finished_ == submitted_;
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t last = submitted_;
  changed_.wait(lock, [&] { return finished_ >= last; });
}

int Stream::error() {
  Guard guard(mutex_);
  return error_;
}

void Stream::close() {
  Guard guard(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::begin_capture() {
  Guard guard(mutex_);
  capture_ = std::make_shared<Graph>();
}

void Stream::join_capture(std::shared_ptr<Graph> graph) {
  Guard guard(mutex_);
  capture_ = graph;
}

std::shared_ptr<Graph> Stream::capture() {
  Guard guard(mutex_);
  return capture_;
}

std::shared_ptr<Graph> Stream::end_capture() {
  auto graph = capture();
  for (auto& stream : streams_of(device)) {
    Guard guard(stream->mutex_);
    if (stream->capture_ == graph) stream->capture_ = nullptr;
  }
  return graph;
}

void record(Event& event, Stream& stream) {
  event.stream = stream.shared_from_this();
  event.graph = stream.capture();
  event.ticket = stream.submit([] { return 0; });
}

bool passed(const Event& event) { return !event.stream || event.stream->reached(event.ticket); }

void wait(const Event& event) {
  if (event.stream) event.stream->wait(event.ticket);
}

void wait_event(Stream& stream, const Event& event) {
  if (event.graph) return stream.join_capture(event.graph);
  Event copy = event;
  stream.submit([copy] { return wait(copy), 0; });
}

void launch_graph(Stream& stream, std::shared_ptr<Graph> graph) {
  stream.submit([graph] {
    for (auto& node : graph->nodes)
      if (int code = node()) return code;
    return 0;
  });
}

std::shared_ptr<Stream> default_stream(int device) {
  {
    Guard guard(streams().mutex);
    auto found = streams().defaults.find(device);
    if (found != streams().defaults.end()) return found->second;
  }
  auto made = Stream::create(device, false);
  Guard guard(streams().mutex);
  streams().others.pop_back();
  return streams().defaults.emplace(device, made).first->second;
}

void synchronize_device(int device) {
  for (auto& stream : streams_of(device)) stream->synchronize();
}

namespace {
thread_local bool inside_host_function = false;
std::mutex& host_functions = *new std::mutex;
}  // namespace

Work host_function(std::function<void()> function) {
  return [function] {
    Guard one_at_a_time(host_functions);
    inside_host_function = true;
    function();
    inside_host_function = false;
    return 0;
  };
}

bool in_host_function() { return inside_host_function; }

// ---- kernels ---------------------------------------------------------------------------------------------------------

namespace {

// Grids are dispatched in order: no block of a later one begins before the last block of an earlier one has.
struct Dispatcher {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<long> room;  // threads, by multiprocessor
  uint64_t arrived = 0, served = 0;

  Dispatcher() : room(multiprocessors(), threads_of_multiprocessor()) {}

  void enter() {
    std::unique_lock<std::mutex> lock(mutex);
    uint64_t ticket = arrived++;
    changed.wait(lock, [&] { return served == ticket; });
  }
  void leave() {
    Guard guard(mutex);
    served++;
    changed.notify_all();
  }
  size_t take(long threads) {
    std::unique_lock<std::mutex> lock(mutex);
    std::vector<long>::iterator most;
    changed.wait(lock, [&] { return *(most = std::max_element(room.begin(), room.end())) >= threads; });
    *most -= threads;
    return most - room.begin();
  }
  void give(size_t multiprocessor, long threads) {
    Guard guard(mutex);
    room[multiprocessor] += threads;
    changed.notify_all();
  }
};

Dispatcher& dispatcher(int device) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, Dispatcher>& all = *new std::map<int, Dispatcher>;
  Guard guard(mutex);
  return all[device];
}

int run_grid(Dispatcher& device, const Kernel& kernel, unsigned blocks, unsigned threads, const Arguments& arguments) {
  std::vector<void*> pointers;
  for (auto& argument : arguments) pointers.push_back((void*)argument.data());
  std::vector<std::thread> running;
  device.enter();
  for (unsigned block = 0; block < blocks; block++) {
    size_t place = device.take(threads);
    running.emplace_back([&, block, place] {
      kernel.enter(block, blocks);
      kernel.call(pointers.data());
      device.give(place, threads);
    });
  }
  device.leave();
  for (auto& thread : running) thread.join();
  return injected("kernel");
}

std::vector<std::string> kernel_files() {
  const char* folder = getenv("FAKEGPU_KERNELS");
  std::vector<std::string> files;
  DIR* open = folder ? opendir(folder) : nullptr;
  if (!open) return files;
  while (dirent* entry = readdir(open)) {
    std::string name = entry->d_name;
    if (name.size() > 3 && name.substr(name.size() - 3) == ".so") files.push_back(std::string(folder) + "/" + name);
  }
  closedir(open);
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

Multicast multicast = nullptr;

const Kernel* find_kernel(const std::string& name) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<std::string, Kernel>& known = *new std::map<std::string, Kernel>;
  Guard guard(mutex);
  auto found = known.find(name);
  if (found != known.end()) return &found->second;
  for (auto& file : kernel_files()) {
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      fprintf(stderr, "fakegpu: %s\n", dlerror());
      continue;
    }
    Kernel kernel{name, (void (*)(void**))dlsym(library, (name + "__call").c_str()), nullptr, {}};
    if (!kernel.call) continue;
    kernel.enter = (void (*)(unsigned, unsigned))dlsym(library, "commrt_enter_block");
    *(Multicast*)dlsym(library, "fakegpu_multicast") = multicast;
    const unsigned* sizes = *(const unsigned* const*)dlsym(library, (name + "__sizes").c_str());
    kernel.sizes.assign(sizes + 1, sizes + 1 + sizes[0]);
    return &known.emplace(name, kernel).first->second;
  }
  fprintf(stderr, "fakegpu: no file in FAKEGPU_KERNELS defines the kernel %s\n", name.c_str());
  return nullptr;
}

Arguments copy_arguments(const Kernel& kernel, void** pointers) {
  Arguments copies;
  for (size_t i = 0; i < kernel.sizes.size(); i++)
    copies.emplace_back((char*)pointers[i], (char*)pointers[i] + kernel.sizes[i]);
  return copies;
}

int resident_blocks(unsigned threads) { return threads ? std::min(32, threads_of_multiprocessor() / (int)threads) : 0; }

void launch(Stream& stream, const Kernel& kernel, unsigned blocks, unsigned threads, Arguments arguments) {
  Dispatcher& device = dispatcher(stream.device);
  stream.submit([&device, &kernel, blocks, threads, arguments] {
    return run_grid(device, kernel, blocks, threads, arguments);
  });
}

}  // namespace fakegpu
