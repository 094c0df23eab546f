// The compiled core: runs programs of planning/steps.py over memory that ranks of one host share.
//
// A plain C interface, which Python calls by ctypes; no headers of Python or of a framework. The numbers of kinds of
// steps, failures, dtypes and operations are those of the lists in Python. Counters are stored with release and loaded
// with acquire order; between a post and the look at who sleeps, and between a sleeper's note of itself and its look at
// the counter, all ranks have to see one order, so these are sequentially consistent.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() asm volatile("yield")
#else
#define RELAX()
#endif

namespace {

enum StepKind : int32_t { COPY_IN, POST, WAIT, CHECK, COPY, COPY_OUT, REDUCE, REDUCE_IN };
enum Failure : int32_t { NONE, DIED, LATE, REFUSED, LEFT, ABORTED };
enum Dtype : int32_t { F32, F64, BF16, F16, I8, U8, I16, I32, I64 };
enum Op : int32_t { SUM, AVG, MIN, MAX, PRODUCT };

struct Step {
    int32_t kind, peer;
    uint64_t slot, at, own, piece, stride, end;
};

struct Program {
    const Step* steps;
    const uint64_t* words;  // what this rank calls
    uint64_t chunk;
    int32_t count, word_count, rounds, dtype, op;
};

struct Line {
    alignas(64) std::atomic<uint32_t> value;
};

struct Counter {  // of one signal from one rank
    alignas(64) std::atomic<uint64_t> value;
    std::atomic<uint32_t> waiters;
};

struct Control {
    Line posted, waiters, left;
    char headers[];
};

// Sleeps on a counter, or wakes sleepers; of a wide one it is the low half, which comes first on these machines.
template <class Number> int futex(std::atomic<Number>& word, int operation, uint32_t value, const timespec* time) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a counter has to come first");
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, time, nullptr, 0);
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

int ended(const std::vector<int>& processes) {
    for (size_t peer = 0; peer < processes.size(); peer++) {
        pollfd look{processes[peer], POLLIN, 0};
        if (processes[peer] >= 0 && poll(&look, 1, 0) > 0) return peer;
    }
    return -1;
}

// Waits for a counter: Note [How a rank waits]. `vain` tells why it need not wait on; what came meanwhile counts.
template <class Number, class Reached, class Vain>
int wait_until(std::atomic<Number>& counter, std::atomic<uint32_t>& waiters, double limit, int spins, int yields,
               Reached reached, Vain vain) {
    const auto come = [&] { return reached(counter.load(std::memory_order_acquire)); };
    for (int i = 0; i < spins; i++) {
        if (come()) return NONE;
        RELAX();
    }
    for (int i = 0; i < yields; i++) {
        if (come()) return NONE;
        sched_yield();
    }
    const timespec slice{0, 50000000};
    for (const double end = now() + limit; !come();) {
        waiters.fetch_add(1, std::memory_order_seq_cst);
        const Number seen = counter.load(std::memory_order_seq_cst);
        if (!reached(seen)) futex(counter, FUTEX_WAIT, uint32_t(seen), &slice);
        waiters.fetch_sub(1, std::memory_order_seq_cst);
        if (come()) break;
        const int why = vain();
        if (come()) break;  // it came, and then its rank ended or left
        if (why) return why;
        if (now() > end) return LATE;
    }
    return NONE;
}

// ---- Reductions, in the order of the ranks. bfloat16 and float16 are reduced in float32 and rounded once.

struct Same {
    template <class T> static T widen(T x) { return x; }
    template <class T> static T narrow(T x) { return x; }
};

struct Brain {
    static float widen(uint16_t half) {
        uint32_t bits = uint32_t(half) << 16;
        float wide;
        memcpy(&wide, &bits, 4);
        return wide;
    }
    static uint16_t narrow(float wide) {  // to the nearest, ties to even; NaN stays one
        uint32_t bits;
        memcpy(&bits, &wide, 4);
        uint16_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
    }
};

struct Half {
    static float widen(uint16_t half) {
        const uint32_t magnitude = half & 0x7fff, sign = uint32_t(half & 0x8000) << 16;
        uint32_t bits = magnitude << 13;
        float wide;
        memcpy(&wide, &bits, 4);
        wide *= 0x1p112f;  // the exponent's other offset; subnormal numbers become normal
        memcpy(&bits, &wide, 4);
        bits = (magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : bits) | sign;
        memcpy(&wide, &bits, 4);
        return wide;
    }
    static uint16_t narrow(float wide) {
        uint32_t bits;
        memcpy(&bits, &wide, 4);
        const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
        float small;  // adding a half shifts a subnormal number into place, and rounds it
        memcpy(&small, &magnitude, 4);
        small += 0.5f;
        uint32_t shifted;
        memcpy(&shifted, &small, 4);
        const uint32_t finite = magnitude < 0x38800000 ? shifted - 0x3f000000 : normal;
        const uint32_t rest = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
        return sign | (magnitude >= 0x47800000 ? rest : finite);
    }
};

struct Add {
    template <class T> static T of(T a, T b) { return a + b; }
};
struct Multiply {
    template <class T> static T of(T a, T b) { return a * b; }
};
struct Least {  // a NaN stays one
    template <class T> static T of(T a, T b) { return a < b || a != a ? a : b; }
};
struct Greatest {
    template <class T> static T of(T a, T b) { return a > b || a != a ? a : b; }
};

constexpr uint64_t BLOCK = 1024;  // elements; a block stays in the innermost cache, and the output may be an input

template <class Combine, class Convert, class Stored, class Wide>
void reduce_as(char* output, const char* const* inputs, int size, uint64_t nbytes, bool average) {
    const uint64_t total = nbytes / sizeof(Stored);
    Wide wide[BLOCK];
    Stored* out = reinterpret_cast<Stored*>(output);
    for (uint64_t at = 0; at < total; at += BLOCK) {
        const uint64_t count = total - at < BLOCK ? total - at : BLOCK;
        const Stored* first = reinterpret_cast<const Stored*>(inputs[0]) + at;
        const Stored* second = reinterpret_cast<const Stored*>(inputs[1]) + at;
        for (uint64_t i = 0; i < count; i++) wide[i] = Combine::of(Wide(Convert::widen(first[i])), Wide(Convert::widen(second[i])));
        for (int rank = 2; rank < size; rank++) {
            const Stored* next = reinterpret_cast<const Stored*>(inputs[rank]) + at;
            for (uint64_t i = 0; i < count; i++) wide[i] = Combine::of(wide[i], Wide(Convert::widen(next[i])));
        }
        if (average)
            for (uint64_t i = 0; i < count; i++) wide[i] /= Wide(size);
        for (uint64_t i = 0; i < count; i++) out[at + i] = Convert::narrow(wide[i]);
    }
}

template <class Convert, class Stored, class Wide>
void reduce_of(int op, char* out, const char* const* in, int size, uint64_t nbytes) {
    switch (op) {
    case MIN: return reduce_as<Least, Convert, Stored, Wide>(out, in, size, nbytes, false);
    case MAX: return reduce_as<Greatest, Convert, Stored, Wide>(out, in, size, nbytes, false);
    case PRODUCT: return reduce_as<Multiply, Convert, Stored, Wide>(out, in, size, nbytes, false);
    default: return reduce_as<Add, Convert, Stored, Wide>(out, in, size, nbytes, op == AVG);
    }
}

void reduce(int dtype, int op, char* out, const char* const* in, int size, uint64_t nbytes) {
    switch (dtype) {
    case F32: return reduce_of<Same, float, float>(op, out, in, size, nbytes);
    case F64: return reduce_of<Same, double, double>(op, out, in, size, nbytes);
    case BF16: return reduce_of<Brain, uint16_t, float>(op, out, in, size, nbytes);
    case F16: return reduce_of<Half, uint16_t, float>(op, out, in, size, nbytes);
    case I8: return reduce_of<Same, int8_t, int8_t>(op, out, in, size, nbytes);
    case U8: return reduce_of<Same, uint8_t, uint8_t>(op, out, in, size, nbytes);
    case I16: return reduce_of<Same, int16_t, int16_t>(op, out, in, size, nbytes);
    case I32: return reduce_of<Same, int32_t, int32_t>(op, out, in, size, nbytes);
    case I64: return reduce_of<Same, int64_t, int64_t>(op, out, in, size, nbytes);
    }
}

}  // namespace

struct Group {
    int rank, size;
    std::vector<char*> base;
    std::vector<int> processes;  // descriptors that become readable when a rank's process ends; -1 for the own one
    uint64_t header, slots, slot;
    double limit;
    int spins, yields;
    uint32_t count = 0;
    std::atomic<bool> aborted{false};
    int32_t failure = NONE, culprit = 0;

    struct Job {
        const Program* program;
        char* output;
        const char* source;
    };
    std::mutex lock;
    std::condition_variable turn;
    std::deque<Job> queue;
    std::thread worker;
    bool busy = false, closing = false;
    uint64_t issued = 0, failed_at = 0;
    std::atomic<uint64_t> finished{0};
    std::atomic<uint32_t> ends{0};  // the low half of `finished`, for sleepers

    Control& control(int peer) { return *reinterpret_cast<Control*>(base[peer]); }
    uint64_t* words(int peer) { return reinterpret_cast<uint64_t*>(control(peer).headers + (count & 1) * header); }
    char* data(int peer, uint32_t ahead = 0) { return base[peer] + slots + (count + ahead & 1) * slot; }

    int fail(int why, int peer) {
        culprit = peer;
        return why;
    }

    int wait_for(int peer) {
        Control& other = control(peer);
        int guilty = peer;
        const int why = wait_until(
            other.posted.value, other.waiters.value, limit, spins, yields,
            [this](uint32_t seen) { return int32_t(seen - count) >= 0; },
            [&] {
                if (aborted.load()) return guilty = rank, ABORTED;
                if (const int dead = ended(processes); dead >= 0) return guilty = dead, DIED;
                return other.left.value.load(std::memory_order_acquire) ? LEFT : NONE;
            });
        return why ? fail(why, guilty) : NONE;
    }

    void post() {
        Control& own = control(rank);
        own.posted.value.store(++count, std::memory_order_seq_cst);
        if (own.waiters.value.load(std::memory_order_seq_cst)) futex(own.posted.value, FUTEX_WAKE, INT32_MAX, nullptr);
    }

    void leave() {
        control(rank).left.value.store(1, std::memory_order_release);
        futex(control(rank).posted.value, FUTEX_WAKE, INT32_MAX, nullptr);
    }

    // Compares what all ranks called; where that says how many rounds there are, counts them.
    int check(const Program& program, int& rounds) {
        const uint64_t* own = words(rank);
        for (int peer = 0; peer < size; peer++)
            if (memcmp(words(peer), own, 2 * sizeof(uint64_t))) return fail(REFUSED, peer);
        if (program.rounds) return NONE;
        uint64_t most = 0;
        for (int sender = 0; sender < size; sender++)
            for (int receiver = 0; receiver < size; receiver++) {
                const uint64_t sent = words(sender)[2 + receiver];
                if (sent != words(receiver)[2 + size + sender]) return fail(REFUSED, sender);
                if (sender != receiver && sent > most) most = sent;
            }
        rounds = (most + program.chunk - 1) / program.chunk;
        return NONE;
    }

    int steps(const Program& program, char* output, const char* source) {
        memcpy(control(rank).headers + (count + 1 & 1) * header, program.words, program.word_count * sizeof(uint64_t));
        std::vector<const char*> parts(size);
        int rounds = program.rounds;
        for (int round = 0; round == 0 || round < rounds; round++)
            for (const Step* step = program.steps; step < program.steps + program.count; step++) {
                int why = NONE;
                switch (step->kind) {
                case POST: post(); continue;
                case WAIT: why = wait_for(step->peer); break;
                case CHECK: why = round == 0 ? check(program, rounds) : NONE; break;
                default: {
                    const uint64_t moved = round * step->stride, at = step->at + moved;
                    if (at >= step->end) continue;
                    const uint64_t nbytes = step->end - at < step->piece ? step->end - at : step->piece;
                    const char* own = source + step->own + moved;
                    if (step->kind == COPY_IN) memcpy(data(rank, 1) + step->slot, source + at, nbytes);
                    else if (step->kind == COPY_OUT) memcpy(output + at, data(step->peer) + step->slot, nbytes);
                    else if (step->kind == COPY) {
                        if (output + at != own) memmove(output + at, own, nbytes);
                    } else {
                        for (int peer = 0; peer < size; peer++) parts[peer] = data(peer) + step->slot;
                        parts[rank] = own;
                        char* target = step->kind == REDUCE ? output + at : data(rank, 1) + step->slot;
                        reduce(program.dtype, program.op, target, parts.data(), size, nbytes);
                    }
                }
                }
                if (why) return why;
            }
        return NONE;
    }

    int run(const Job& job) {
        if (!failure) {
            failure = steps(*job.program, job.output, job.source);
            if (failure) leave();
        }
        return failure;
    }

    void work() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            turn.wait(held, [this] { return !busy && (closing || !queue.empty()); });
            if (queue.empty()) return;
            busy = true;
            held.unlock();
            const int why = run(queue.front());
            held.lock();
            if (why && !failed_at) failed_at = finished + 1;
            queue.pop_front();
            busy = false;
            finished++;
            ends.fetch_add(1, std::memory_order_seq_cst);
            futex(ends, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr);
        }
    }
};

extern "C" {

Group* hp_open(int rank, int size, const uint64_t* bases, const int* processes, uint64_t header, uint64_t slots,
               uint64_t slot, double limit, int spins, int yields) {
    Group* group = new Group;
    group->rank = rank, group->size = size, group->header = header, group->slots = slots, group->slot = slot;
    group->limit = limit, group->spins = spins, group->yields = yields;
    for (int peer = 0; peer < size; peer++) {
        group->base.push_back(reinterpret_cast<char*>(bases[peer]));
        group->processes.push_back(processes[peer]);
    }
    return group;
}

uint64_t hp_issue(Group* group, const Program* program, char* output, const char* source) {
    std::lock_guard<std::mutex> held(group->lock);
    if (!group->worker.joinable()) group->worker = std::thread(&Group::work, group);
    group->queue.push_back({program, output, source});
    group->turn.notify_all();
    return ++group->issued;
}

int hp_wait(Group* group, uint64_t number) {
    for (int i = 0; i < group->spins && group->finished < number; i++) RELAX();
    for (int i = 0; i < group->yields && group->finished < number; i++) sched_yield();
    for (;;) {
        const uint32_t seen = group->ends.load(std::memory_order_seq_cst);
        if (group->finished >= number) break;
        futex(group->ends, FUTEX_WAIT_PRIVATE, seen, nullptr);
    }
    std::lock_guard<std::mutex> held(group->lock);
    return group->failed_at && group->failed_at <= number ? group->failure : int32_t(NONE);
}

int hp_run(Group* group, const Program* program, char* output, const char* source) {
    {
        std::unique_lock<std::mutex> held(group->lock);
        if (group->busy || !group->queue.empty()) {
            held.unlock();
            return hp_wait(group, hp_issue(group, program, output, source));
        }
        group->busy = true;
    }
    const int why = group->run({program, output, source});
    std::lock_guard<std::mutex> held(group->lock);
    if (why && !group->failed_at) group->failed_at = group->finished + 1;
    group->busy = false;
    group->turn.notify_all();
    return why;
}

int hp_failure(Group* group) { return group->failure; }
uint64_t hp_finished(Group* group) { return group->finished; }
uint32_t hp_count(Group* group) { return group->count; }
int hp_culprit(Group* group) { return group->culprit; }

void hp_abort(Group* group) {
    group->aborted = true;
    group->leave();
}

void hp_stop(Group* group) {
    {
        std::lock_guard<std::mutex> held(group->lock);
        group->closing = true;
        group->turn.notify_all();
    }
    if (group->worker.joinable()) group->worker.join();
    group->leave();
}

void hp_add(Counter* counter, uint64_t n) {
    counter->value.fetch_add(n, std::memory_order_seq_cst);
    if (counter->waiters.load(std::memory_order_seq_cst)) futex(counter->value, FUTEX_WAKE, INT32_MAX, nullptr);
}

int hp_await(Counter* counter, uint64_t value, Control* sender, const int* processes, int size, double limit, int spins,
             int yields, int* culprit) {
    const std::vector<int> peers(processes, processes + size);
    return wait_until(
        counter->value, counter->waiters, limit, spins, yields, [value](uint64_t seen) { return seen >= value; },
        [&] {
            if (const int dead = ended(peers); dead >= 0) return *culprit = dead, DIED;
            return sender->left.value.load(std::memory_order_acquire) ? LEFT : NONE;
        });
}

void hp_reduce(int dtype, int op, char* output, const char* const* inputs, int size, uint64_t nbytes) {
    reduce(dtype, op, output, inputs, size, nbytes);
}

void hp_free(Group* group) {
    hp_abort(group);
    hp_stop(group);
    delete group;
}
}
