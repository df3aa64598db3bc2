// The scheduler of emulate.h, the switch between fibers, and the reports of the compiler's checks.
#include "emulate.h"

#include <sys/mman.h>
#if !defined(__x86_64__) || defined(EMULATED_UCONTEXT)
#define EMULATED_UCONTEXT
#include <ucontext.h>
#endif

namespace emulated {

Block block;

static unsigned char* stacks() {  // pages are taken as they are touched
    static unsigned char* memory = static_cast<unsigned char*>(
        mmap(nullptr, size_t(MOST_THREADS) * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    return memory;
}

static void first_of_a_fiber() {
    block.body(block.arguments);
    block.n_finished++;
    yield_to_scheduler();
}

#ifndef EMULATED_UCONTEXT
// Keeps what the System V ABI says a function keeps, and goes on with another stack.
asm(R"(
.text
.local emulated_switch
.type emulated_switch, @function
emulated_switch:
    pushq %rbx
    pushq %rbp
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbp
    popq %rbx
    ret
)");
extern "C" void emulated_switch(void** save, void* to);

static void make_fiber(int thread) {
    void** top = reinterpret_cast<void**>(stacks() + size_t(thread + 1) * STACK_BYTES);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&first_of_a_fiber);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    block.stack_pointer[thread] = top;
}
static void enter(int thread) { emulated_switch(&block.scheduler, block.stack_pointer[thread]); }
void yield_to_scheduler() { emulated_switch(&block.stack_pointer[block.current], block.scheduler); }
#else
static ucontext_t contexts[MOST_THREADS], scheduler_context;
static void make_fiber(int thread) {
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks() + size_t(thread) * STACK_BYTES;
    contexts[thread].uc_stack.ss_size = STACK_BYTES;
    makecontext(&contexts[thread], first_of_a_fiber, 0);
}
static void enter(int thread) { swapcontext(&scheduler_context, &contexts[thread]); }
void yield_to_scheduler() { swapcontext(&contexts[block.current], &scheduler_context); }
#endif

void fail(const char* format, ...) {
    int n = snprintf(block.error, sizeof block.error, "block (%d, %d, %d), thread %d: ", block.index[0], block.index[1],
                     block.index[2], block.current);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(block.error + n, sizeof block.error - n, format, arguments);
    va_end(arguments);
    block.failed = true;
    yield_to_scheduler();
    __builtin_unreachable();
}

static void report(const char* format, int number) {
    int n = snprintf(block.error, sizeof block.error, "block (%d, %d, %d): ", block.index[0], block.index[1], block.index[2]);
    snprintf(block.error + n, sizeof block.error - n, format, number);
    block.failed = true;
}

static void run_block(bool reverse) {
    block.n_finished = block.n_arrived = block.n_waited = block.first_ready = block.n_ready = 0;
    for (Warp& warp : block.warps) warp.n_arrived = 0;
    for (int i = 0; i < block.n_threads; i++) {
        block.copies[i].current.clear();
        block.copies[i].groups.clear();
        make_fiber(i);
        make_ready(reverse ? block.n_threads - 1 - i : i);
    }
    while (block.n_ready && !block.failed) {
        block.current = block.ready[block.first_ready];
        block.first_ready = (block.first_ready + 1) % MOST_THREADS;
        block.n_ready--;
        enter(block.current);
    }
    if (!block.failed && block.n_finished < block.n_threads)
        report("%d threads wait for others that have ended or wait elsewhere", block.n_threads - block.n_finished);
}

const char* run_grid(const Launch& launch, void (*body)(void**)) {
    int n_blocks = launch.grid[0] * launch.grid[1] * launch.grid[2];
    size_t n_bytes = launch.shared_bytes + 2 * GUARD_BYTES;
    unsigned char* memory = static_cast<unsigned char*>(aligned_alloc(128, (n_bytes + 255) / 128 * 128)) + 16;
    block.failed = false;
    block.error[0] = 0;
    block.body = body;
    block.arguments = launch.arguments;
    block.n_threads = launch.n_threads;
    block.shared = memory + GUARD_BYTES;  // aligned to 16 bytes and no more
    memcpy(block.n_blocks, launch.grid, sizeof launch.grid);
    for (int i = 0; i < n_blocks && !block.failed; i++) {
        int index = launch.reverse ? n_blocks - 1 - i : i;
        block.index[0] = index % launch.grid[0];
        block.index[1] = index / launch.grid[0] % launch.grid[1];
        block.index[2] = index / launch.grid[0] / launch.grid[1];
        memset(memory, GUARD, n_bytes);
        memset(block.shared, UNWRITTEN, launch.shared_bytes);
        run_block(launch.reverse);
        if (!block.failed && launch.overlaps && block.n_waited != block.n_threads)
            report("%d threads did not wait for the kernel before", block.n_threads - block.n_waited);
        for (int byte = 0; byte < GUARD_BYTES && !block.failed; byte++) {
            if (block.shared[launch.shared_bytes + byte] != GUARD) report("wrote %d bytes after its shared memory", byte);
            if (block.shared[-1 - byte] != GUARD) report("wrote %d bytes before its shared memory", byte + 1);
        }
    }
    free(memory - 16);
    return block.failed ? block.error : nullptr;
}

}  // namespace emulated

// What -fsanitize calls; the first field of each record is the place (libsanitizer, ubsan_handlers.h).
struct Place {
    const char* file;
    uint32_t line, column;
};
extern "C" void __ubsan_handle_type_mismatch_v1(Place* place, uintptr_t pointer) {
    emulated::fail("%s:%u: a pointer that is not aligned to its type (%#llx)", place->file, place->line,
                   static_cast<unsigned long long>(pointer));
}
extern "C" void __ubsan_handle_out_of_bounds(Place* place, uintptr_t index) {
    emulated::fail("%s:%u: index %lld is outside of its array", place->file, place->line, static_cast<long long>(index));
}
extern "C" void __ubsan_handle_shift_out_of_bounds(Place* place, uintptr_t, uintptr_t bits) {
    emulated::fail("%s:%u: a shift by %lld bits", place->file, place->line, static_cast<long long>(bits));
}
