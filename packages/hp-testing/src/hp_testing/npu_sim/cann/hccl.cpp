// HCCL's interface. Every call is done when it returns.
#include "hccl/hccl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator.h"
#include "failure.h"
#include "reduction.h"
#include "settings.h"

using npu_sim::Communicator;
using npu_sim::element_size;
using npu_sim::Failure;
using npu_sim::guarded;
using npu_sim::Step;
using npu_sim::Transfer;

namespace {

constexpr uint64_t kDefaultTimeLimit = 1836;  // seconds, HCCL_EXEC_TIMEOUT's default

// What each communicator of this process was made with, for tests: a JSON list.
std::mutex records_mutex;
std::string records;

// The communicators that there are, by name: fused operators are told a name.
std::mutex names_mutex;
std::map<std::string, Communicator*> named_communicators;

Communicator& use(HcclComm communicator) { return *static_cast<Communicator*>(communicator); }

void record(uint32_t size, uint32_t rank, const HcclCommConfig* config) {
  char text[400];
  std::snprintf(text, sizeof text,
                R"({"size": %u, "rank": %u, "buffer_size": %lld, "exec_timeout": %d, "name": "%.128s"})", size, rank,
                config == nullptr || config->hcclBufferSize == HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET
                    ? -1LL
                    : static_cast<long long>(config->hcclBufferSize),
                config == nullptr ? -1 : config->hcclExecTimeOut, config == nullptr ? "" : config->hcclCommName);
  std::lock_guard<std::mutex> lock(records_mutex);
  records += (records.empty() ? "" : ", ") + std::string(text);
}

HcclResult join(uint32_t size, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig* config,
                HcclComm* communicator) {
  return guarded([&] {
    uint64_t limit = npu_sim::number_of_environment("HCCL_EXEC_TIMEOUT", kDefaultTimeLimit);
    if (config != nullptr && config->hcclExecTimeOut > 0) {
      limit = static_cast<uint64_t>(config->hcclExecTimeOut);
    }
    bool named = config != nullptr && config->hcclCommName[0] != '\0';
    std::string name = named ? config->hcclCommName : std::string("npu_sim_") + root->internal;
    record(size, rank, config);
    auto* made = new Communicator(root->internal, size, rank, name, static_cast<double>(limit));
    *communicator = made;
    std::lock_guard<std::mutex> lock(names_mutex);
    named_communicators[name] = made;
  });
}

// Where each rank's piece lies in a buffer, in bytes.
struct Pieces {
  std::vector<size_t> sizes;
  std::vector<size_t> offsets;
};

Pieces equal_pieces(uint32_t ranks, size_t size) {
  Pieces pieces;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    pieces.sizes.push_back(size);
    pieces.offsets.push_back(size * rank);
  }
  return pieces;
}

Pieces given_pieces(uint32_t ranks, const void* counts, const void* displacements, size_t element) {
  Pieces pieces;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    pieces.sizes.push_back(static_cast<const uint64_t*>(counts)[rank] * element);
    pieces.offsets.push_back(static_cast<const uint64_t*>(displacements)[rank] * element);
  }
  return pieces;
}

size_t largest(const Pieces& pieces) { return *std::max_element(pieces.sizes.begin(), pieces.sizes.end()); }

// How much of a piece remains at an offset, at most `limit`.
size_t remaining(size_t size, size_t offset, size_t limit) { return offset < size ? std::min(limit, size - offset) : 0; }

void gather(Communicator& group, const char* input, char* output, const Pieces& pieces, Step step) {
  size_t offset = 0;
  do {
    std::memcpy(group.own_slot(), input + offset, remaining(pieces.sizes[group.rank()], offset, Communicator::kSlot));
    auto slots = group.step(step);
    for (uint32_t rank = 0; rank < group.size(); ++rank) {
      size_t size = remaining(pieces.sizes[rank], offset, Communicator::kSlot);
      std::memcpy(output + pieces.offsets[rank] + offset, slots[rank], size);
    }
    offset += Communicator::kSlot;
  } while (offset < largest(pieces));
}

// Reduces a whole buffer; ranks that don't want the result have no output.
void reduce_all(Communicator& group, const char* input, char* output, uint64_t count, HcclDataType type,
                HcclReduceOp op, Step step) {
  size_t element = element_size(type);
  size_t total = count * element;
  size_t offset = 0;
  do {
    size_t size = remaining(total, offset, Communicator::kSlot);
    std::memcpy(group.own_slot(), input + offset, size);
    auto slots = group.step(step);
    if (output != nullptr) {
      npu_sim::reduce(slots, output + offset, size / element, type, op);
    }
    offset += Communicator::kSlot;
  } while (offset < total);
}

// Reduces piece by piece, each for the rank that owns it: a slot holds a part of every piece.
void reduce_pieces(Communicator& group, const char* input, char* output, const Pieces& pieces, HcclDataType type,
                   HcclReduceOp op, Step step) {
  size_t element = element_size(type);
  size_t limit = Communicator::kSlot / group.size() / element * element;
  size_t offset = 0;
  do {
    for (uint32_t rank = 0; rank < group.size(); ++rank) {
      std::memcpy(group.own_slot() + limit * rank, input + pieces.offsets[rank] + offset,
                  remaining(pieces.sizes[rank], offset, limit));
    }
    auto slots = group.step(step);
    for (auto& slot : slots) {
      slot += limit * group.rank();
    }
    size_t size = remaining(pieces.sizes[group.rank()], offset, limit);
    npu_sim::reduce(slots, output + offset, size / element, type, op);
    offset += limit;
  } while (offset < largest(pieces));
}

void exchange_pieces(Communicator& group, const void* input, const Pieces& sent, const void* output,
                     const Pieces& received) {
  std::vector<Transfer> transfers;
  auto* from = static_cast<char*>(const_cast<void*>(input));
  auto* to = static_cast<char*>(const_cast<void*>(output));
  for (uint32_t rank = 0; rank < group.size(); ++rank) {
    transfers.push_back({Transfer::kSend, rank, from + sent.offsets[rank], sent.sizes[rank]});
    transfers.push_back({Transfer::kReceive, rank, to + received.offsets[rank], received.sizes[rank]});
  }
  group.exchange(transfers);
}

// Runs an operation of a communicator.
template <class Function>
HcclResult run(HcclComm communicator, Function function) {
  return guarded([&] {
    Communicator& group = use(communicator);
    std::lock_guard<std::mutex> lock(group.mutex);
    function(group);
  });
}

// Sends and receives between HcclGroupStart and HcclGroupEnd go together.
thread_local int group_depth = 0;
thread_local std::vector<std::pair<Communicator*, Transfer>> group_transfers;

HcclResult transfer(HcclComm communicator, Transfer one) {
  if (group_depth > 0) {
    group_transfers.emplace_back(&use(communicator), one);
    return HCCL_SUCCESS;
  }
  return run(communicator, [&](Communicator& group) {
    std::vector<Transfer> transfers{one};
    group.exchange(transfers);
  });
}

}  // namespace

// For tests: what the communicators of this process were made with, as JSON.
extern "C" const char* npu_sim_communicators() {
  static std::string text;
  std::lock_guard<std::mutex> lock(records_mutex);
  text = "[" + records + "]";
  return text.c_str();
}

// For fused operators: the communicator of a name, null where there is none.
extern "C" HcclComm npu_sim_communicator(const char* name) {
  std::lock_guard<std::mutex> lock(names_mutex);
  auto found = named_communicators.find(name);
  return found == named_communicators.end() ? nullptr : found->second;
}

std::string& npu_sim::recent_error() {
  thread_local std::string text;
  return text;
}

const char* aclGetRecentErrMsg() { return npu_sim::recent_error().c_str(); }

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  return guarded([&] {
    std::memset(root, 0, sizeof(*root));
    Communicator::create_root().copy(root->internal, sizeof(root->internal) - 1);
  });
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* root, uint32_t rank, HcclComm* communicator) {
  return join(size, root, rank, nullptr, communicator);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* communicator) {
  return join(size, root, rank, config, communicator);
}

HcclResult HcclCommDestroy(HcclComm communicator) {
  {
    std::lock_guard<std::mutex> lock(names_mutex);
    auto found = named_communicators.find(use(communicator).name());
    if (found != named_communicators.end() && found->second == communicator) {
      named_communicators.erase(found);
    }
  }
  delete &use(communicator);
  return HCCL_SUCCESS;
}

// All settings of HcclCommConfig are understood.
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
const char* HcclGetErrorString(HcclResult) { return npu_sim::recent_error().c_str(); }
HcclResult HcclCommWorkingDevNicSet(HcclComm, uint32_t*, bool*, uint32_t) { return HCCL_SUCCESS; }

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm communicator, char* name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", use(communicator).name().c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
                         HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    reduce_all(group, static_cast<char*>(input), static_cast<char*>(output), count, type, op,
               {HCCL_CMD_ALLREDUCE, type, op, count});
  });
}

HcclResult HcclReduce(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    char* target = group.rank() == root ? static_cast<char*>(output) : nullptr;
    reduce_all(group, static_cast<char*>(input), target, count, type, op,
               {HCCL_CMD_REDUCE, type, static_cast<int32_t>(root), count});
  });
}

HcclResult HcclReduceScatter(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    reduce_pieces(group, static_cast<char*>(input), static_cast<char*>(output),
                  equal_pieces(group.size(), count * element_size(type)), type, op,
                  {HCCL_CMD_REDUCE_SCATTER, type, op, count});
  });
}

HcclResult HcclReduceScatterV(void* input, const void* counts, const void* displacements, void* output, uint64_t,
                              HcclDataType type, HcclReduceOp op, HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    reduce_pieces(group, static_cast<char*>(input), static_cast<char*>(output),
                  given_pieces(group.size(), counts, displacements, element_size(type)), type, op,
                  {HCCL_CMD_REDUCE_SCATTER_V, type, op, 0});
  });
}

HcclResult HcclAllGather(void* input, void* output, uint64_t count, HcclDataType type, HcclComm communicator,
                         aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    gather(group, static_cast<char*>(input), static_cast<char*>(output),
           equal_pieces(group.size(), count * element_size(type)), {HCCL_CMD_ALLGATHER, type, 0, count});
  });
}

HcclResult HcclAllGatherV(void* input, uint64_t, void* output, const void* counts, const void* displacements,
                          HcclDataType type, HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    gather(group, static_cast<char*>(input), static_cast<char*>(output),
           given_pieces(group.size(), counts, displacements, element_size(type)), {HCCL_CMD_ALLGATHER_V, type, 0, 0});
  });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm communicator,
                         aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    size_t total = count * element_size(type);
    size_t offset = 0;
    do {
      size_t size = remaining(total, offset, Communicator::kSlot);
      char* place = static_cast<char*>(buffer) + offset;
      if (group.rank() == root) {
        std::memcpy(group.own_slot(), place, size);
      }
      auto slots = group.step({HCCL_CMD_BROADCAST, type, static_cast<int32_t>(root), count});
      if (group.rank() != root) {
        std::memcpy(place, slots[root], size);
      }
      offset += Communicator::kSlot;
    } while (offset < total);
  });
}

HcclResult HcclScatter(void* input, void* output, uint64_t count, HcclDataType type, uint32_t root,
                       HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    size_t size = count * element_size(type);
    std::vector<Transfer> transfers{{Transfer::kReceive, root, static_cast<char*>(output), size}};
    for (uint32_t rank = 0; group.rank() == root && rank < group.size(); ++rank) {
      transfers.push_back({Transfer::kSend, rank, static_cast<char*>(input) + size * rank, size});
    }
    group.exchange(transfers);
  });
}

HcclResult HcclBarrier(HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) { group.step({HCCL_CMD_BARRIER, 0, 0, 0}); });
}

HcclResult HcclAlltoAll(const void* input, uint64_t sent, HcclDataType sent_type, const void* output,
                        uint64_t received, HcclDataType received_type, HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    exchange_pieces(group, input, equal_pieces(group.size(), sent * element_size(sent_type)), output,
                    equal_pieces(group.size(), received * element_size(received_type)));
  });
}

HcclResult HcclAlltoAllV(const void* input, const void* sent, const void* sent_at, HcclDataType sent_type,
                         const void* output, const void* received, const void* received_at,
                         HcclDataType received_type, HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    exchange_pieces(group, input, given_pieces(group.size(), sent, sent_at, element_size(sent_type)), output,
                    given_pieces(group.size(), received, received_at, element_size(received_type)));
  });
}

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm communicator,
                    aclrtStream) {
  return transfer(communicator, {Transfer::kSend, peer, static_cast<char*>(buffer), count * element_size(type)});
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm communicator,
                    aclrtStream) {
  return transfer(communicator, {Transfer::kReceive, peer, static_cast<char*>(buffer), count * element_size(type)});
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t number, HcclComm communicator, aclrtStream) {
  return run(communicator, [&](Communicator& group) {
    std::vector<Transfer> transfers;
    for (uint32_t i = 0; i < number; ++i) {
      auto direction = items[i].sendRecvType == HCCL_SEND ? Transfer::kSend : Transfer::kReceive;
      transfers.push_back({direction, items[i].remoteRank, static_cast<char*>(items[i].buf),
                           items[i].count * element_size(items[i].dataType)});
    }
    group.exchange(transfers);
  });
}

HcclResult HcclGroupStart() {
  ++group_depth;
  return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd() {
  if (--group_depth > 0) {
    return HCCL_SUCCESS;
  }
  return guarded([&] {
    auto waiting = std::exchange(group_transfers, {});
    while (!waiting.empty()) {
      Communicator* group = waiting.front().first;
      std::vector<Transfer> transfers;
      for (auto& [owner, one] : waiting) {
        if (owner == group) {
          transfers.push_back(one);
        }
      }
      std::lock_guard<std::mutex> lock(group->mutex);
      group->exchange(transfers);
      waiting.erase(std::remove_if(waiting.begin(), waiting.end(), [&](auto& item) { return item.first == group; }),
                    waiting.end());
    }
  });
}
