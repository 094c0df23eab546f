#include "communicator.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>

#include "failure.h"

namespace npu_sim {

namespace {

constexpr size_t kRing = size_t{256} << 10;  // bytes on the way from one rank to another
constexpr size_t kHeader = sizeof(uint64_t);  // each message begins with its size
constexpr int kYields = 16;
constexpr long kNap = 200'000'000;  // nanoseconds between looks at the peers
constexpr double kConnectLimit = 120.0;  // seconds, HCCL_CONNECT_TIMEOUT's default

double seconds() {
  auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

// std::atomic<uint32_t> is the word itself; the futex is shared between processes.
uint32_t* word_of(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
  timespec nap{0, kNap};
  syscall(SYS_futex, word_of(word), FUTEX_WAIT, value, &nap, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, word_of(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

size_t rounded(size_t size) { return (size + 4095) & ~size_t{4095}; }

}  // namespace

struct Communicator::Shared {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> generation;
};

struct Communicator::Member {
  std::atomic<int32_t> process;
  std::atomic<uint32_t> bell;  // counts what has happened in this rank's rings
  Step steps[2];
};

// A queue of bytes; both numbers only grow.
struct Communicator::Ring {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> read;
};

std::string Communicator::create_root() {
  int file = static_cast<int>(syscall(SYS_memfd_create, "npu_sim_hccl", 1U /* MFD_CLOEXEC */));
  if (file < 0) {
    throw Failure(HCCL_E_SYSCALL, std::string("memfd_create: ") + std::strerror(errno));
  }
  return std::to_string(getpid()) + " " + std::to_string(file);
}

Communicator::Communicator(const std::string& root, uint32_t size, uint32_t rank, std::string name, double time_limit)
    : size_(size), rank_(rank), name_(std::move(name)), time_limit_(time_limit) {
  int process = 0;
  int file = -1;
  if (std::sscanf(root.c_str(), "%d %d", &process, &file) != 2) {
    throw Failure(HCCL_E_PARA, "this root info is not the simulation's");
  }
  std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  size_t tables = rounded(sizeof(Shared) + sizeof(Member) * size + sizeof(Ring) * size * size);
  mapped_ = tables + 2 * kSlot * size + kRing * size * size;
  if (own < 0 || ftruncate(own, static_cast<off_t>(mapped_)) != 0) {
    throw Failure(HCCL_E_OPEN_FILE_FAILURE, path + ": " + std::strerror(errno));
  }
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
  close(own);
  if (memory == MAP_FAILED) {
    throw Failure(HCCL_E_MEMORY, std::string("mmap: ") + std::strerror(errno));
  }
  // The file begins as zeros, which is what all of these start from.
  memory_ = static_cast<char*>(memory);
  shared_ = reinterpret_cast<Shared*>(memory_);
  members_ = reinterpret_cast<Member*>(shared_ + 1);
  rings_ = reinterpret_cast<Ring*>(members_ + size);
  memory_ += tables;
  members_[rank].process = getpid();
  arrive(kConnectLimit);
  if (process == getpid()) {
    close(file);
  }
}

Communicator::~Communicator() { munmap(shared_, mapped_); }

char* Communicator::slot(uint32_t rank, uint32_t turn) { return memory_ + kSlot * (2 * rank + turn); }

char* Communicator::own_slot() { return slot(rank_, turn_); }

Communicator::Ring& Communicator::ring(uint32_t source, uint32_t target) { return rings_[source * size_ + target]; }

char* Communicator::ring_data(uint32_t source, uint32_t target) {
  return memory_ + 2 * kSlot * size_ + kRing * (source * size_ + target);
}

std::vector<const char*> Communicator::step(const Step& mine) {
  members_[rank_].steps[turn_] = mine;
  arrive(time_limit_);
  std::vector<const char*> slots;
  for (uint32_t rank = 0; rank < size_; ++rank) {
    const Step& other = members_[rank].steps[turn_];
    if (other.kind != mine.kind || other.type != mine.type || other.detail != mine.detail ||
        other.count != mine.count) {
      char text[300];
      std::snprintf(text, sizeof text,
                    "ranks of the group %s disagree (operation, type, reduction or root, count): rank %u has "
                    "(%u, %d, %d, %llu), rank %u has (%u, %d, %d, %llu)",
                    name_.c_str(), rank_, mine.kind, mine.type, mine.detail,
                    static_cast<unsigned long long>(mine.count), rank, other.kind, other.type, other.detail,
                    static_cast<unsigned long long>(other.count));
      throw Failure(HCCL_E_PARA, text);
    }
    slots.push_back(slot(rank, turn_));
  }
  turn_ = 1 - turn_;
  return slots;
}

void Communicator::arrive(double time_limit) {
  uint32_t generation = shared_->generation;
  if (shared_->arrived.fetch_add(1) + 1 == size_) {
    shared_->arrived = 0;
    shared_->generation.fetch_add(1);
    wake_all(shared_->generation);
    return;
  }
  double since = seconds();
  while (shared_->generation == generation) {
    wait_while(shared_->generation, generation, since, time_limit);
  }
}

// See Note [Waiting]. May return early.
void Communicator::wait_while(std::atomic<uint32_t>& word, uint32_t value, double since, double time_limit) {
  for (int turn = 0; turn < kYields; ++turn) {
    if (word != value) {
      return;
    }
    sched_yield();
  }
  sleep_on(word, value);
  if (word != value) {
    return;
  }
  check_members();
  if (seconds() - since > time_limit) {
    throw Failure(HCCL_E_TIMEOUT, "rank " + std::to_string(rank_) + " of the group " + name_ + " waited for " +
                                      std::to_string(static_cast<int>(time_limit)) + " s");
  }
}

void Communicator::check_members() {
  for (uint32_t rank = 0; rank < size_; ++rank) {
    int process = members_[rank].process;
    if (process != 0 && kill(process, 0) != 0 && errno == ESRCH) {
      throw Failure(HCCL_E_REMOTE, "rank " + std::to_string(rank) + " of the group " + name_ + " has died");
    }
  }
}

void Communicator::notify(uint32_t rank) {
  members_[rank].bell.fetch_add(1);
  wake_all(members_[rank].bell);
}

void Communicator::exchange(std::vector<Transfer>& transfers) {
  double since = seconds();
  std::atomic<uint32_t>& bell = members_[rank_].bell;
  while (true) {
    uint32_t heard = bell;
    bool finished = true;
    bool moved = false;
    for (size_t i = 0; i < transfers.size(); ++i) {
      Transfer& transfer = transfers[i];
      if (transfer.done == transfer.size + kHeader) {
        continue;
      }
      finished = false;
      bool follows = std::any_of(transfers.begin(), transfers.begin() + static_cast<long>(i), [&](const Transfer& t) {
        return t.direction == transfer.direction && t.peer == transfer.peer && t.done < t.size + kHeader;
      });
      if (!follows && advance(transfer)) {
        moved = true;
        notify(transfer.peer);
      }
    }
    if (finished) {
      return;
    }
    if (moved) {
      since = seconds();
    } else {
      wait_while(bell, heard, since, time_limit_);
    }
  }
}

// Moves what can be moved now.
bool Communicator::advance(Transfer& transfer) {
  bool sends = transfer.direction == Transfer::kSend;
  Ring& queue = sends ? ring(rank_, transfer.peer) : ring(transfer.peer, rank_);
  char* data = sends ? ring_data(rank_, transfer.peer) : ring_data(transfer.peer, rank_);
  bool moved = false;
  while (transfer.done < transfer.size + kHeader) {
    uint64_t written = queue.written;
    uint64_t read = queue.read;
    uint64_t available = sends ? kRing - (written - read) : written - read;
    uint64_t place = (sends ? written : read) % kRing;
    if (transfer.done == 0) {
      uint64_t size = transfer.size;
      if (available < kHeader) {
        break;
      }
      // The header may wrap around: it goes byte by byte.
      auto* bytes = reinterpret_cast<char*>(&size);
      for (size_t i = 0; i < kHeader; ++i) {
        char& shared = data[(place + i) % kRing];
        (sends ? shared : bytes[i]) = sends ? bytes[i] : shared;
      }
      if (size != transfer.size) {
        throw Failure(HCCL_E_PARA, "rank " + std::to_string(rank_) + " of the group " + name_ + " receives " +
                                       std::to_string(transfer.size) + " bytes from rank " +
                                       std::to_string(transfer.peer) + ", which sent " + std::to_string(size));
      }
      transfer.done = kHeader;
      (sends ? queue.written : queue.read) += kHeader;
      moved = true;
      continue;
    }
    uint64_t piece = std::min({available, kRing - place, transfer.size + kHeader - transfer.done});
    if (piece == 0) {
      break;
    }
    char* own = transfer.data + (transfer.done - kHeader);
    std::memcpy(sends ? data + place : own, sends ? own : data + place, piece);
    transfer.done += piece;
    (sends ? queue.written : queue.read) += piece;
    moved = true;
  }
  return moved;
}

}  // namespace npu_sim
