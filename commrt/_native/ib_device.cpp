// Finding libibverbs and its devices.
#include "ib_device.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include <mutex>
#include <new>
#include <string>

using namespace commrt;
using namespace commrt::ib;

namespace {

std::mutex loading;
Verbs loaded;
std::string loaded_from;

template <class Function> bool find(void* library, const char* name, Function& function, const char*& missing) {
  function = (Function)dlsym(library, name);
  if (!function && !missing) missing = name;
  return function;
}

// The name of the first function that the library lacks, or null.
const char* look_up(void* library, Verbs& v) {
  const char* missing = nullptr;
#define FIND(name) find(library, "ibv_" #name, v.name, missing)
  FIND(get_device_list), FIND(free_device_list), FIND(get_device_name), FIND(open_device), FIND(close_device);
  FIND(query_port), FIND(query_gid), FIND(alloc_pd), FIND(dealloc_pd), FIND(reg_mr), FIND(dereg_mr);
  FIND(create_cq), FIND(destroy_cq), FIND(create_qp), FIND(modify_qp), FIND(destroy_qp), FIND(wc_status_str), FIND(fork_init);
#undef FIND
  return missing;
}

// The devices as libibverbs lists them. Those that speak iWARP or a protocol of their own can't be joined this way.
class Devices {
 public:
  explicit Devices(cr_ib_why* why) : list_(verbs().get_device_list(&n_)) {
    if (!list_) refuse(why, "no verbs device: %s", errno == ENOSYS ? "the kernel has no RDMA support" : strerror(errno));
  }
  ~Devices() { if (list_) verbs().free_device_list(list_); }
  Devices(const Devices&) = delete;

  bool known() const { return list_; }
  Device* at(u32 index) const {
    for (int k = 0; k < n_; k++)
      if (list_[k]->node_type == NODE_CA && index-- == 0) return list_[k];
    return nullptr;
  }
  Device* named(const char* name) const {
    for (u32 k = 0; Device* device = at(k); k++)
      if (!strcmp(verbs().get_device_name(device), name)) return device;
    return nullptr;
  }

 private:
  int n_ = 0;
  Device** list_;
};

}  // namespace

const Verbs& commrt::ib::verbs() { return loaded; }

cr_ib::~cr_ib() {
  for (Mr* region : regions) verbs().dereg_mr(region);
  if (pd) verbs().dealloc_pd(pd);
  if (context) verbs().close_device(context);
}

extern "C" {

int cr_ib_load(const char* library, cr_ib_why* why) {
  std::lock_guard<std::mutex> one(loading);
  if (loaded_from == library) return 0;
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return refuse(why, "no libibverbs: %s", dlerror());
  Verbs found;
  if (const char* missing = look_up(handle, found)) return refuse(why, "%s is broken: it has no %s", library, missing);
  loaded = found;
  loaded_from = library;
  loaded.fork_init();  // fails where someone else has used verbs before: then it is theirs to decide
  return 0;
}

int cr_ib_device(unsigned index, char name[64], cr_ib_why* why) {
  Devices devices(why);
  if (!devices.known()) return -1;
  Device* device = devices.at(index);
  if (!device) return 0;
  snprintf(name, 64, "%s", verbs().get_device_name(device));
  return 1;
}

int cr_ib_open(const char* name, cr_ib** out, cr_ib_why* why) {
  Devices devices(why);
  if (!devices.known()) return -1;
  Device* device = devices.named(name);
  if (!device) return refuse(why, "there is no verbs device %s", name);
  auto* ib = new (std::nothrow) cr_ib;
  if (!ib) return refuse(why, "no memory");
  if ((ib->context = verbs().open_device(device))) ib->pd = verbs().alloc_pd(ib->context);
  if (ib->pd) return *out = ib, 0;
  int error = errno;
  delete ib;
  return refuse(why, "%s can't be opened: %s", name, strerror(error));
}

void cr_ib_close(cr_ib* ib) { delete ib; }

int cr_ib_query_port(cr_ib* ib, unsigned port, cr_ib_port* out) {
  PortAttr attributes{};
  int error = verbs().query_port(ib->context, (uint8_t)port, &attributes);
  if (error) return error;
  *out = {attributes.state == PORT_ACTIVE, attributes.link_layer, attributes.lid, (unsigned)attributes.active_mtu,
          (unsigned)attributes.gid_tbl_len};
  return 0;
}

int cr_ib_query_gid(cr_ib* ib, unsigned port, unsigned index, unsigned char gid[16]) {
  return verbs().query_gid(ib->context, (uint8_t)port, (int)index, gid) ? (errno ? errno : EINVAL) : 0;
}

int cr_ib_register(cr_ib* ib, unsigned number, void* memory, unsigned long long nbytes, unsigned* key, cr_ib_why* why) {
  Mr* region = verbs().reg_mr(ib->pd, memory, nbytes, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ);
  if (!region) {
    const char* hint = errno == ENOMEM ? "; does `ulimit -l` allow to lock that much?" : "";
    return refuse(why, "%llu bytes can't be registered: %s%s", nbytes, strerror(errno), hint);
  }
  ib->regions.push_back(region);
  *key = region->rkey;
  bool fits = ib->memories.set(number, (u64)memory, nbytes, region->lkey);
  return fits ? 0 : refuse(why, "there can be no more than %u registered memories", MOST_MEMORIES);
}
}
