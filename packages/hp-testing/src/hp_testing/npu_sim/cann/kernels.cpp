// The few device kernels that torch_npu's C++ launches by itself and not through the dispatcher: Fill, PadV3,
// Cast and Identity.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> sizes;
  aclFormat format;
};

struct aclDataBuffer {
  void* data;
  size_t size;
};

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int rank, const int64_t* sizes, aclFormat format) {
  return new aclTensorDesc{type, std::vector<int64_t>(sizes, sizes + rank), format};
}

void aclDestroyTensorDesc(const aclTensorDesc* description) { delete description; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclDataType aclGetTensorDescType(const aclTensorDesc* description) { return description->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* description) { return description->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* description) { return description->sizes.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* description, size_t dim, int64_t* size) {
  *size = description->sizes[dim];
  return ACL_SUCCESS;
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) { return new aclDataBuffer{data, size}; }

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

namespace {

size_t element_size(aclDataType type) {
  switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    default:
      return 4;
  }
}

size_t count(const aclTensorDesc* description) {
  size_t elements = 1;
  for (int64_t size : description->sizes) {
    elements *= static_cast<size_t>(size);
  }
  return elements;
}

int64_t integer(const aclTensorDesc* description, const aclDataBuffer* buffer, size_t index) {
  return description->type == ACL_INT64 ? static_cast<int64_t*>(buffer->data)[index]
                                        : static_cast<int32_t*>(buffer->data)[index];
}

// out[...] = value
void fill(const aclDataBuffer* value, const aclTensorDesc* out_type, const aclDataBuffer* out) {
  size_t element = element_size(out_type->type);
  for (size_t k = 0; k < count(out_type) && (k + 1) * element <= out->size; ++k) {
    std::memcpy(static_cast<char*>(out->data) + k * element, value->data, element);
  }
}

// Zeros around the input; `pads` has (before, after) for each dim.
void pad(const aclTensorDesc* in_type, const aclDataBuffer* in, const aclTensorDesc* pads_type,
         const aclDataBuffer* pads, const aclTensorDesc* out_type, const aclDataBuffer* out) {
  size_t element = element_size(in_type->type);
  for (size_t k = 0; k < count(out_type); ++k) {
    size_t rest = k;
    int64_t offset = 0;
    int64_t stride = 1;
    bool inside = true;
    for (size_t dim = in_type->sizes.size(); dim-- > 0;) {
      auto out_size = static_cast<size_t>(out_type->sizes[dim]);
      int64_t index = static_cast<int64_t>(rest % out_size) - integer(pads_type, pads, 2 * dim);
      rest /= out_size;
      inside = inside && index >= 0 && index < in_type->sizes[dim];
      offset += index * stride;
      stride *= in_type->sizes[dim];
    }
    char* place = static_cast<char*>(out->data) + k * element;
    if (inside) {
      std::memcpy(place, static_cast<char*>(in->data) + offset * static_cast<int64_t>(element), element);
    } else {
      std::memset(place, 0, element);
    }
  }
}

// Numbers are read as and written from this type; torch_npu casts small integers for HCCL, and nothing else.
int64_t load(aclDataType type, const void* data, size_t index) {
  switch (type) {
    case ACL_BOOL:
    case ACL_UINT8:
      return static_cast<const uint8_t*>(data)[index];
    case ACL_INT8:
      return static_cast<const int8_t*>(data)[index];
    case ACL_INT32:
      return static_cast<const int32_t*>(data)[index];
    default:
      return static_cast<const int64_t*>(data)[index];
  }
}

void store(aclDataType type, void* data, size_t index, int64_t value) {
  switch (type) {
    case ACL_BOOL:
      static_cast<uint8_t*>(data)[index] = value != 0;
      break;
    case ACL_UINT8:
      static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(value);
      break;
    case ACL_INT8:
      static_cast<int8_t*>(data)[index] = static_cast<int8_t>(value);
      break;
    case ACL_INT32:
      static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value);
      break;
    default:
      static_cast<int64_t*>(data)[index] = value;
  }
}

bool castable(aclDataType type) {
  return type == ACL_BOOL || type == ACL_UINT8 || type == ACL_INT8 || type == ACL_INT32 || type == ACL_INT64;
}

void cast(const aclTensorDesc* in_type, const aclDataBuffer* in, const aclTensorDesc* out_type,
          const aclDataBuffer* out) {
  for (size_t k = 0; k < count(out_type); ++k) {
    store(out_type->type, out->data, k, load(in_type->type, in->data, k));
  }
}

}  // namespace

aclError aclopCompileAndExecute(const char* kind, int, const aclTensorDesc* const in_types[],
                                const aclDataBuffer* const in[], int, const aclTensorDesc* const out_types[],
                                aclDataBuffer* const out[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                const char*, aclrtStream) {
  std::string name(kind);
  if (name == "Fill") {
    fill(in[1], out_types[0], out[0]);
  } else if (name == "PadV3") {
    pad(in_types[0], in[0], in_types[1], in[1], out_types[0], out[0]);
  } else if (name == "Identity") {
    std::memcpy(out[0]->data, in[0]->data, std::min(out[0]->size, in[0]->size));
  } else if (name == "Cast" && castable(in_types[0]->type) && castable(out_types[0]->type)) {
    cast(in_types[0], in[0], out_types[0], out[0]);
  } else {
    std::fprintf(stderr, "npu simulation: the device kernel %s has no stand-in\n", kind);
    return ACL_ERROR_OP_NOT_FOUND;
  }
  return ACL_SUCCESS;
}

aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 8; }

aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  std::memset(value, 0, length);
  return ACL_SUCCESS;
}
