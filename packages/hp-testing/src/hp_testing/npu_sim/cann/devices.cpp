// Devices and their memory. Device memory is host memory, counted for each device, and refused past its limit.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "acl/acl.h"
#include "settings.h"

namespace {

constexpr size_t kAlignment = 512;  // CANN's, which torch_npu's allocator relies on
constexpr aclError kOutOfMemory = 207001;  // ACL_ERROR_RT_MEMORY_ALLOCATION
constexpr aclError kInvalidDevice = 107001;  // ACL_ERROR_INVALID_DEVICE's number in the runtime

thread_local int32_t current_device = 0;
std::atomic<bool> any_device{false};

struct Allocation {
  size_t size;
  int32_t device;
};

// What is allocated on the devices, for the limits.
struct Ledger {
  std::mutex mutex;
  std::unordered_map<void*, Allocation> allocations;
  std::vector<size_t> used = std::vector<size_t>(npu_sim::device_count());
};

Ledger& ledger() {
  static auto* instance = new Ledger;  // never destroyed: tensors may be freed while the process exits
  return *instance;
}

void* host_memory(size_t size) {
  void* pointer = nullptr;
  return posix_memalign(&pointer, kAlignment, size == 0 ? kAlignment : size) == 0 ? pointer : nullptr;
}

aclError allocate(void** pointer, size_t size) {
  Ledger& book = ledger();
  std::lock_guard<std::mutex> lock(book.mutex);
  size_t& used = book.used[current_device];
  if (size > npu_sim::device_memory() - used || (*pointer = host_memory(size)) == nullptr) {
    return kOutOfMemory;
  }
  used += size;
  book.allocations[*pointer] = {size, current_device};
  return ACL_SUCCESS;
}

// Note [The shim loads itself]: aten's NPU kernels are replaced by the library beside this one. It is loaded when
// the runtime is initialised, which is after libtorch_npu has registered its kernels and before any of them runs. So
// a process needs nothing but LD_LIBRARY_PATH to be on the simulation.
bool load_shim() {
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&load_shim), &self) == 0) {
    return false;
  }
  std::string path(self.dli_fname);
  path = path.substr(0, path.rfind('/') + 1) + "libnpu_sim_shim.so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "npu simulation: %s\n", dlerror());
    return false;
  }
  using Install = void (*)();
  reinterpret_cast<Install>(dlsym(library, "npu_sim_install"))();
  return true;
}

}  // namespace

aclError aclInit(const char*) {
  static const bool loaded = load_shim();
  return loaded ? ACL_SUCCESS : ACL_ERROR_FAILURE;
}

aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclrtGetSocName() { return "Ascend910B1"; }

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = npu_sim::device_count();
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || static_cast<uint32_t>(device) >= npu_sim::device_count()) {
    return kInvalidDevice;
  }
  current_device = device;
  any_device = true;
  return ACL_SUCCESS;
}

// Fails before the process has set a device, as CANN does: torch_npu then sets device 0, and notes that it is in use.
aclError aclrtGetDevice(int32_t* device) {
  if (!any_device) {
    return ACL_ERROR_RT_CONTEXT_NULL;
  }
  *device = current_device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

// A context is a device: the address of its entry in this table.
static int32_t contexts[64];

aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = &contexts[current_device];
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context != nullptr) {
    current_device = static_cast<int32_t>(static_cast<int32_t*>(context) - contexts);
  }
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) {
    *flags = 0;
  }
  if (active != nullptr) {
    *active = 1;
  }
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) { return allocate(pointer, size); }
aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy) { return allocate(pointer, size); }

aclError aclrtFree(void* pointer) {
  Ledger& book = ledger();
  {
    std::lock_guard<std::mutex> lock(book.mutex);
    auto found = book.allocations.find(pointer);
    if (found != book.allocations.end()) {
      book.used[found->second.device] -= found->second.size;
      book.allocations.erase(found);
    }
  }
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  Ledger& book = ledger();
  std::lock_guard<std::mutex> lock(book.mutex);
  *total = npu_sim::device_memory();
  *free = *total - book.used[current_device];
  return ACL_SUCCESS;
}

// Pinned host memory. torch_npu keeps a list of the blocks that it pinned, so there is nothing to mark here.
aclError aclrtMallocHost(void** pointer, size_t size) {
  return (*pointer = host_memory(size)) != nullptr ? ACL_SUCCESS : kOutOfMemory;
}

aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, aclrtMallocConfig*) {
  return aclrtMallocHost(pointer, size);
}

aclError aclrtFreeHost(void* pointer) {
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtHostRegister(void* pointer, uint64_t, aclrtHostRegisterType, void** device_pointer) {
  *device_pointer = pointer;
  return ACL_SUCCESS;
}

aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  Ledger& book = ledger();
  std::lock_guard<std::mutex> lock(book.mutex);
  std::memset(attributes, 0, sizeof(*attributes));
  auto found = book.allocations.find(const_cast<void*>(pointer));
  bool here = found != book.allocations.end();
  attributes->location.id = here ? found->second.device : 0;
  attributes->location.type = here ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* target, size_t, const void* source, size_t count, aclrtMemcpyKind) {
  std::memmove(target, source, count);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* target, size_t, const void* source, size_t count, aclrtMemcpyKind, aclrtStream) {
  std::memmove(target, source, count);
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* target, size_t, int32_t value, size_t count) {
  std::memset(target, value, count);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* target, size_t, int32_t value, size_t count, aclrtStream) {
  std::memset(target, value, count);
  return ACL_SUCCESS;
}
