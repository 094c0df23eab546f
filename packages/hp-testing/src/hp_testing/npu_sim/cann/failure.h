// How the simulation reports what went wrong: thrown inside, a code and a message at CANN's interface.
#pragma once

#include <exception>
#include <string>

#include "hccl/hccl.h"

namespace npu_sim {

struct Failure : std::exception {
  Failure(HcclResult result, std::string text) : code(result), message(std::move(text)) {}
  const char* what() const noexcept override { return message.c_str(); }

  HcclResult code;
  std::string message;
};

// What aclGetRecentErrMsg tells, which torch_npu puts into its exceptions.
std::string& recent_error();

// Runs one call of HCCL's interface.
template <class Function>
HcclResult guarded(Function function) {
  try {
    function();
    return HCCL_SUCCESS;
  } catch (const Failure& failure) {
    recent_error() = "npu simulation: " + failure.message;
    return failure.code;
  }
}

}  // namespace npu_sim
