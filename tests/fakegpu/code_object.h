// What an AMD code object says of itself: its target, and each kernel's parameters, from the metadata note of the ELF file.
#pragma once
#include <elf.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fakegpu {

struct DeviceKernel {
  std::vector<unsigned> sizes;  // of its parameters, in bytes
  unsigned most_threads = 0;    // of a block
};

struct CodeObject {
  std::string target;           // such as amdgcn-amd-amdhsa--gfx942
  std::map<std::string, DeviceKernel> kernels;
};

namespace metadata {

// As much of msgpack as the metadata is written in.
struct Value {
  uint64_t number = 0;
  std::string text;
  std::vector<Value> list;
  std::map<std::string, Value> fields;

  const Value& operator[](const std::string& name) const {
    static const Value nothing;
    auto found = fields.find(name);
    return found == fields.end() ? nothing : found->second;
  }
};

class Reader {
 public:
  Reader(const unsigned char* at, size_t nbytes) : at_(at), end_(at + nbytes) {}

  Value value() {
    Value v;
    unsigned char type = byte();
    if (type < 0x80) v.number = type;
    else if (type < 0x90) map(v, type & 15);
    else if (type < 0xa0) list(v, type & 15);
    else if (type < 0xc0) v.text = text(type & 31);
    else if (type == 0xc2 || type == 0xc3) v.number = type & 1;
    else if (type >= 0xcc && type <= 0xcf) v.number = number(1u << (type - 0xcc));
    else if (type >= 0xd9 && type <= 0xdb) v.text = text(number(1u << (type - 0xd9)));
    else if (type == 0xdc || type == 0xdd) list(v, number(2u << (type - 0xdc)));
    else if (type == 0xde || type == 0xdf) map(v, number(2u << (type - 0xde)));
    else whole = false;
    return v;
  }

  bool whole = true;

 private:
  unsigned char byte() { return at_ < end_ ? *at_++ : (whole = false, 0); }
  uint64_t number(unsigned nbytes) {
    uint64_t n = 0;
    while (nbytes--) n = n << 8 | byte();
    return n;
  }
  std::string text(uint64_t nbytes) {
    if (nbytes > (uint64_t)(end_ - at_)) return whole = false, "";
    at_ += nbytes;
    return std::string((const char*)at_ - nbytes, nbytes);
  }
  void list(Value& v, uint64_t n) {
    while (whole && n--) v.list.push_back(value());
  }
  void map(Value& v, uint64_t n) {
    while (whole && n--) {
      std::string name = value().text;
      v.fields[name] = value();
    }
  }

  const unsigned char *at_, *end_;
};

inline CodeObject describe(const Value& root) {
  CodeObject object;
  object.target = root["amdhsa.target"].text;
  for (auto& kernel : root["amdhsa.kernels"].list) {
    DeviceKernel& found = object.kernels[kernel[".name"].text];
    found.most_threads = (unsigned)kernel[".max_flat_workgroup_size"].number;
    for (auto& argument : kernel[".args"].list)
      if (argument[".value_kind"].text.rfind("hidden_", 0)) found.sizes.push_back((unsigned)argument[".size"].number);
  }
  return object;
}

}  // namespace metadata

// Nothing if it is no code object for AMD GPUs. `image` is as long as its ELF header says.
inline std::optional<CodeObject> read_code_object(const void* image) {
  enum { EM_AMD_GPU = 224, NT_METADATA = 32 };
  auto* base = (const unsigned char*)image;
  auto* header = (const Elf64_Ehdr*)image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_machine != EM_AMD_GPU) return std::nullopt;
  auto* segments = (const Elf64_Phdr*)(base + header->e_phoff);
  for (int i = 0; i < header->e_phnum; i++) {
    if (segments[i].p_type != PT_NOTE) continue;
    auto* note = (const Elf64_Nhdr*)(base + segments[i].p_offset);
    if (note->n_type != NT_METADATA || memcmp(note + 1, "AMDGPU", 7)) continue;
    metadata::Reader reader((const unsigned char*)(note + 1) + (note->n_namesz + 3) / 4 * 4, note->n_descsz);
    metadata::Value root = reader.value();
    if (reader.whole) return metadata::describe(root);
  }
  return std::nullopt;
}

}  // namespace fakegpu
