// Blocks of threads as fibers of one CPU thread: who runs, who waits at which operation, and what is wrong.
// Never knows what an operation computes (lanes.cuh does).
// Hazard: a fiber that fails is abandoned on its stack, so kernels must hold nothing that needs a destructor.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <type_traits>
#include <utility>
#include <vector>

namespace emulated {

constexpr int MOST_THREADS = 1024, STACK_BYTES = 128 << 10, GUARD_BYTES = 4096;
constexpr unsigned char UNWRITTEN = 0xCD, GUARD = 0xA5;

struct Warp {
    int n_arrived = 0;
    const char* what = nullptr;
    uint32_t in[32][10];
    uint32_t out[32][4];
};

struct Copy {
    void* to;
    const void* from;
    int n_bytes;
};
struct Copies {  // of one thread: those in no group yet, and the groups on their way
    std::vector<Copy> current;
    std::deque<std::vector<Copy>> groups;
};

struct Launch {  // as emulator.py declares it
    int32_t grid[3];
    int32_t n_threads;
    int32_t shared_bytes;
    int32_t reverse;
    int32_t overlaps;  // each thread must wait for the kernel before
    void** arguments;
};

struct Block {
    int current = 0, n_threads = 0, n_finished = 0, n_arrived = 0, n_waited = 0;
    int index[3] = {}, n_blocks[3] = {};
    const char* what = nullptr;
    bool flag = false, failed = false;
    char error[400] = {};
    unsigned char* shared = nullptr;
    int ready[MOST_THREADS], first_ready = 0, n_ready = 0;
    void* stack_pointer[MOST_THREADS];
    void* scheduler = nullptr;
    Warp warps[MOST_THREADS / 32];
    Copies copies[MOST_THREADS];
    void (*body)(void**) = nullptr;
    void** arguments = nullptr;
};

extern Block block;
void yield_to_scheduler();
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

inline void make_ready(int thread) {
    block.ready[(block.first_ready + block.n_ready++) % MOST_THREADS] = thread;
}

// The last of the participants to come does `act` for all; then all go on.
template <class Act> void meet(const char* what, int& n_arrived, const char*& meeting, int first, int n, Act act) {
    if (n_arrived == 0) meeting = what;
    if (meeting != what) fail("%s, where others of its warp or block are at %s", what, meeting);
    if (++n_arrived < n) return yield_to_scheduler();
    act();
    n_arrived = 0;
    for (int thread = first; thread < first + n; thread++)
        if (thread != block.current) make_ready(thread);
}
template <class Act> void meet_warp(const char* what, Act act) {
    Warp& warp = block.warps[block.current / 32];
    meet(what, warp.n_arrived, warp.what, block.current / 32 * 32, 32, [&] { act(warp); });
}
template <class Act> void meet_block(const char* what, Act act) {
    if (block.warps[block.current / 32].n_arrived) fail("%s, where others of its warp are at a warp operation", what);
    meet(what, block.n_arrived, block.what, 0, block.n_threads, act);
}

const char* run_grid(const Launch& launch, void (*body)(void**));

template <class T> constexpr char letter() {
    if constexpr (std::is_pointer_v<T>) return 'p';
    else if constexpr (std::is_same_v<T, float>) return 'f';
    else {
        static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "a parameter no launch can pass");
        return sizeof(T) == 4 ? 'i' : 'l';
    }
}

template <auto kernel, class = decltype(kernel)> struct Entry;
template <auto kernel, class... Parameters> struct Entry<kernel, void (*)(Parameters...)> {
    static constexpr char signature[] = {letter<Parameters>()..., '\0'};
    static void body(void** arguments) { call(arguments, std::index_sequence_for<Parameters...>{}); }
    template <size_t... I> static void call(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<Parameters*>(arguments[I])...);
    }
};

}  // namespace emulated

#define ENTRY(number, ...)                                                                                     \
    extern "C" const char* signature_##number() { return emulated::Entry<&__VA_ARGS__>::signature; }            \
    extern "C" const char* run_##number(const emulated::Launch* launch) {                                      \
        return emulated::run_grid(*launch, emulated::Entry<&__VA_ARGS__>::body);                               \
    }
