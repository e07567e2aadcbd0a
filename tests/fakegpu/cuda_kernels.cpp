// The fake libcuda.so.1: modules and launches. An image must be a real cubin for the device that is claimed; what runs
// is the CPU build of the kernel of that name, once its parameters are seen to be the cubin's.
#include <elf.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <string>

#include "cuda_driver.h"

using namespace fakecuda;

namespace {

enum { ELF_OF_CUDA = 190, ATTRIBUTE_MAX_THREADS = 0x05, ATTRIBUTE_PARAMETER = 0x17, FORM_SIZED = 4 };

struct Function {
  const fakegpu::Kernel* kernel;
  unsigned most_threads;
};

struct Section {
  std::string name;
  const unsigned char* begin;
  size_t nbytes;
};

struct Module {
  std::string image;
  std::map<std::string, CUfunction> functions;

  std::vector<Section> sections() const {
    const char* base = image.data();
    auto* header = (const Elf64_Ehdr*)base;
    auto* table = (const Elf64_Shdr*)(base + header->e_shoff);
    const char* names = base + table[header->e_shstrndx].sh_offset;
    std::vector<Section> found;
    for (int i = 0; i < header->e_shnum; i++)
      found.push_back({names + table[i].sh_name, (const unsigned char*)base + table[i].sh_offset, table[i].sh_size});
    return found;
  }
};

Handles<Module>& modules = *new Handles<Module>;
Handles<Function>& functions = *new Handles<Function>;

unsigned word(const unsigned char* at) { return at[0] | at[1] << 8 | at[2] << 16 | (unsigned)at[3] << 24; }

// The driver is given no size either: as far as the section headers and program headers reach.
CUresult read_image(const void* image, std::string& copy) {
  auto* header = (const Elf64_Ehdr*)image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_machine != ELF_OF_CUDA) return CUDA_ERROR_INVALID_IMAGE;
  bool newer = header->e_ident[EI_ABIVERSION] >= 8;
  int architecture = newer ? header->e_flags >> 8 & 0xff : header->e_flags & 0xff;
  int capability = (int)fakegpu::setting("FAKEGPU_CAPABILITY", 90);
  if (architecture / 10 != capability / 10 || architecture > capability) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  size_t end = std::max(header->e_shoff + (size_t)header->e_shnum * header->e_shentsize,
                        header->e_phoff + (size_t)header->e_phnum * header->e_phentsize);
  auto* sections = (const Elf64_Shdr*)((const char*)image + header->e_shoff);
  for (int i = 0; i < header->e_shnum; i++)
    if (sections[i].sh_type != SHT_NOBITS) end = std::max(end, (size_t)(sections[i].sh_offset + sections[i].sh_size));
  copy.assign((const char*)image, end);
  return CUDA_SUCCESS;
}

// What the compiler noted of the kernel: the sizes of its parameters, and its launch bounds.
void read_notes(const Section& section, std::map<unsigned, unsigned>& sizes, unsigned& most_threads) {
  const unsigned char *at = section.begin, *end = at + section.nbytes;
  while (at + 4 <= end) {
    unsigned form = at[0], attribute = at[1], nbytes = at[2] | at[3] << 8;
    const unsigned char* value = at + 4;
    at = value + (form == FORM_SIZED ? nbytes : 0);
    if (form != FORM_SIZED || at > end) continue;
    if (attribute == ATTRIBUTE_PARAMETER && nbytes >= 12) sizes[value[4] | value[5] << 8] = word(value + 8) >> 18;
    if (attribute == ATTRIBUTE_MAX_THREADS && nbytes >= 4) most_threads = word(value);
  }
}

CUresult find_function(const Module& module, const std::string& name, Function& function) {
  bool there = false;
  std::map<unsigned, unsigned> sizes;
  function.most_threads = 1024;
  for (auto& section : module.sections()) {
    there |= section.name == ".text." + name;
    if (section.name == ".nv.info." + name) read_notes(section, sizes, function.most_threads);
  }
  function.kernel = there ? fakegpu::find_kernel(name) : nullptr;
  if (!function.kernel) return CUDA_ERROR_NOT_FOUND;
  std::vector<unsigned> expected;
  for (auto& size : sizes) expected.push_back(size.second);
  if (expected == function.kernel->sizes) return CUDA_SUCCESS;
  fprintf(stderr, "fakegpu: the parameters of %s in the cubin are not those of its CPU build\n", name.c_str());
  return CUDA_ERROR_INVALID_IMAGE;
}

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  auto module = std::make_shared<Module>();
  if (CUresult code = read_image(image, module->image); code != CUDA_SUCCESS) return code;
  fakegpu::synchronize_device(device());  // loading may need the device to itself
  *handle = (CUmodule)modules.add(module);
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule handle) {
  FAKE_CALL_OUTSIDE_CAPTURE;
  auto module = modules.remove(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  fakegpu::synchronize_device(device());
  for (auto& function : module->functions) functions.remove(function.second);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* handle, CUmodule of, const char* name) {
  FAKE_CALL_IN_CONTEXT;
  auto module = modules.get(of);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  auto known = module->functions.find(name);
  if (known != module->functions.end()) return *handle = known->second, CUDA_SUCCESS;
  auto function = std::make_shared<Function>();
  if (CUresult code = find_function(*module, name, *function); code != CUDA_SUCCESS) return code;
  *handle = module->functions[name] = (CUfunction)functions.add(function);
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
  FAKE_CALL_IN_CONTEXT;
  return functions.get(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads, size_t) {
  FAKE_CALL_IN_CONTEXT;
  auto function = functions.get(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (threads < 1) return CUDA_ERROR_INVALID_VALUE;
  *blocks = (unsigned)threads > function->most_threads ? 0 : fakegpu::resident_blocks(threads);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction handle, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned thread_y,
                        unsigned thread_z, unsigned shared, CUstream stream, void** arguments, void** packed) {
  FAKE_CALL_IN_CONTEXT;
  auto function = functions.get(handle);
  auto at = fakecuda::stream(stream);
  if (!function || !at) return CUDA_ERROR_INVALID_HANDLE;
  if (!blocks || !threads || threads > function->most_threads) return CUDA_ERROR_INVALID_VALUE;
  if (y != 1 || z != 1 || thread_y != 1 || thread_z != 1 || shared || packed) return CUDA_ERROR_NOT_SUPPORTED;
  if (!arguments && !function->kernel->sizes.empty()) return CUDA_ERROR_INVALID_VALUE;
  fakegpu::launch(*at, *function->kernel, blocks, threads, fakegpu::copy_arguments(*function->kernel, arguments));
  return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction handle, unsigned blocks, unsigned y, unsigned z, unsigned threads,
                                   unsigned thread_y, unsigned thread_z, unsigned shared, CUstream stream,
                                   void** arguments) {
  FAKE_CALL_IN_CONTEXT;
  unsigned fit = fakegpu::multiprocessors() * fakegpu::resident_blocks(threads);
  if (blocks > fit) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  return cuLaunchKernel(handle, blocks, y, z, threads, thread_y, thread_z, shared, stream, arguments, nullptr);
}

}  // extern "C"

static Symbols added({
    FAKE_SYMBOL(cuModuleLoadData, 2000),
    FAKE_SYMBOL(cuModuleUnload, 2000),
    FAKE_SYMBOL(cuModuleGetFunction, 2000),
    FAKE_SYMBOL(cuFuncLoad, 12040),
    FAKE_SYMBOL(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050),
    FAKE_SYMBOL(cuLaunchKernel, 4000),
    FAKE_SYMBOL(cuLaunchCooperativeKernel, 9000),
});
