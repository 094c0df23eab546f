// A communicator of HCCL: ranks that are processes of one machine, and memory that they share.
//
// Note [Shared memory]: a communicator's memory is an anonymous file (memfd) that rank 0 makes and the others open
// through /proc. It has no name, so nothing is left behind however the ranks end, and it doesn't count against
// /dev/shm. It is of fixed size: tensors of any size pass through it in pieces. Pages that are not touched cost
// nothing.
//
// Note [Waiting]: ranks are usually more than cores. A rank that has to wait yields a few times and then sleeps on a
// futex. It wakes up now and then to see whether a peer has died, and gives up at HCCL's time limit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "hccl/hccl.h"

namespace npu_sim {

// One message between two ranks; several may be under way.
struct Transfer {
  enum Direction { kSend, kReceive } direction;
  uint32_t peer;
  char* data;
  uint64_t size;      // in bytes
  uint64_t done = 0;  // bytes moved so far, the header's included
};

// What a rank does in a step that all ranks take together. It is compared: ranks that disagree would hang or read
// nonsense on a device.
struct Step {
  uint32_t kind;  // HcclCMDType
  int32_t type;   // HcclDataType
  int32_t detail;  // the reduction, or the root
  uint64_t count;
};

class Communicator {
 public:
  // Bytes that a rank can hand to all others in one step.
  static constexpr size_t kSlot = size_t{256} << 10;

  // Makes the shared memory, and gives what the other ranks need to find it.
  static std::string create_root();

  // Joins; returns when all ranks have.
  Communicator(const std::string& root, uint32_t size, uint32_t rank, std::string name, double time_limit);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  uint32_t size() const { return size_; }
  uint32_t rank() const { return rank_; }
  const std::string& name() const { return name_; }

  // The memory to fill before a step.
  char* own_slot();
  // Waits until all ranks have filled theirs, and compares what they are doing. The slots may then be read until the
  // next step but one begins: they are two, used in turns, so that one wait a step is enough.
  std::vector<const char*> step(const Step& mine);

  // Sends and receives at the same time, in the order of each peer's transfers.
  void exchange(std::vector<Transfer>& transfers);

  // One operation at a time, whatever threads issue them.
  std::mutex mutex;

 private:
  struct Shared;
  struct Member;
  struct Ring;

  void arrive(double time_limit);
  void wait_while(std::atomic<uint32_t>& word, uint32_t value, double since, double time_limit);
  void check_members();
  bool advance(Transfer& transfer);
  Ring& ring(uint32_t source, uint32_t target);
  char* ring_data(uint32_t source, uint32_t target);
  char* slot(uint32_t rank, uint32_t turn);
  void notify(uint32_t rank);

  uint32_t size_;
  uint32_t rank_;
  std::string name_;
  double time_limit_;  // in seconds
  uint32_t turn_ = 0;
  size_t mapped_ = 0;
  char* memory_ = nullptr;
  Shared* shared_ = nullptr;
  Member* members_ = nullptr;
  Ring* rings_ = nullptr;
};

}  // namespace npu_sim
