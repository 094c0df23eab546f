// DeepSpeed's all-reduce of ranks on one host as a program of its own, to measure beside ours: whole messages in shared
// buffers, waits that spin. Up to 1 MiB each rank reads what all have written; above, each sums its slice, and reads the
// other slices. Two sets of buffers, so that a call needs no last barrier. No code is DeepSpeed's.
//     g++ -O3 -march=native -shared -fPIC spinning_all_reduce.cpp -o spinning_all_reduce.so
#include <atomic>
#include <cstddef>
#include <cstring>

constexpr std::size_t most = 32u << 20, small = 1u << 20;

struct Rank {
    std::atomic<long> copied, summed;
    char padding[4096 - 2 * sizeof(std::atomic<long>)];
    char buffers[2][most];
};

static void wait_for(std::atomic<long>& state, long call) {
    while (state.load(std::memory_order_acquire) < call) __builtin_ia32_pause();
}

// `out` may be one of the summands, so that a block is summed beside it.
static void sum(float* out, Rank* ranks, int count, int set, std::size_t from, std::size_t to) {
    float block[2048];
    for (; from < to; from += 2048) {
        const std::size_t n = to - from < 2048 ? to - from : 2048;
        std::memset(block, 0, n * sizeof(float));
        for (int rank = 0; rank < count; ++rank) {
            const float* next = reinterpret_cast<const float*>(ranks[rank].buffers[set]) + from;
            for (std::size_t i = 0; i < n; ++i) block[i] += next[i];
        }
        std::memcpy(out + from, block, n * sizeof(float));
    }
}

static void reduce(Rank* ranks, int rank, int count, float* data, std::size_t n, long call) {
    const int set = call % 2;
    Rank& own = ranks[rank];
    std::memcpy(own.buffers[set], data, n * sizeof(float));
    own.copied.store(call, std::memory_order_release);
    for (int other = 0; other < count; ++other) wait_for(ranks[other].copied, call);
    if (n * sizeof(float) <= small) {
        sum(data, ranks, count, set, 0, n);
        own.summed.store(call, std::memory_order_release);
        return;
    }
    const auto begin = [&](int other) { return n * other / count; };
    // Into the rank's own buffer, over its own summands, which nobody else reads.
    float* slice = reinterpret_cast<float*>(own.buffers[set]);
    sum(slice, ranks, count, set, begin(rank), begin(rank + 1));
    own.summed.store(call, std::memory_order_release);
    for (int other = 0; other < count; ++other) {
        wait_for(ranks[other].summed, call);
        const float* from = reinterpret_cast<const float*>(ranks[other].buffers[set]) + begin(other);
        std::memcpy(data + begin(other), from, (begin(other + 1) - begin(other)) * sizeof(float));
    }
}

extern "C" std::size_t bytes_of(int count) { return count * sizeof(Rank); }

// `call` is the number of the last call of all; returns that of this one.
extern "C" long all_reduce(void* memory, int rank, int count, float* data, std::size_t n, long call) {
    const std::size_t step = most / sizeof(float);
    for (std::size_t done = 0; done < n; done += step)
        reduce(static_cast<Rank*>(memory), rank, count, data + done, n - done < step ? n - done : step, ++call);
    return call;
}
