// What the kernels use of the machine: warp products and shuffles, barriers, loads, conversions, arrival of blocks.
// Never includes another header, so that NVRTC needs none and a test can put an emulated file of this name in its place.
// Hazard: warp operations use the full mask; all 32 lanes of a warp must come to the same one.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define KERNEL(...) __global__ void __launch_bounds__(__VA_ARGS__)  // threads of a block, and blocks of a multiprocessor
#define DEVICE __device__ __forceinline__

// Where this thread is. Blocks have one dimension.
DEVICE int thread_x() { return threadIdx.x; }
DEVICE int n_threads() { return blockDim.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int n_blocks_x() { return gridDim.x; }

// The dynamic shared memory of the block, aligned to 16 bytes; kernels have no other.
DEVICE u8* shared_bytes() {
    extern __shared__ __align__(16) u8 dynamic_shared[];
    return dynamic_shared;
}

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

template <class T> DEVICE T shfl(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
template <class T> DEVICE T shfl_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// The largest of all lanes' values, in every lane.
DEVICE u32 max_of_warp(u32 value) {
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(value));
    return most;
}

// c[16 x 8] += a[16 x 16] * b[16 x 8], bf16 with f32 sums. With g = lane / 4 and t = lane % 4, low half first:
// a[0], a[1]: rows g, g + 8 at columns 2t, 2t + 1; a[2], a[3]: the same rows at columns 2t + 8, 2t + 9;
// b0, b1: column g at rows 2t, 2t + 1 and 2t + 8, 2t + 9; c[0], c[1]: row g at columns 2t, 2t + 1; c[2], c[3]: row g + 8.
// (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type")
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same in integers, exact: s32 sums of bytes, those of a unsigned or (SIGNED) signed, those of b signed. 32 columns of a:
// a[0], a[1]: rows g, g + 8 at columns 4t .. 4t + 3; a[2], a[3]: the same rows 16 columns on; b0, b1: column g likewise.
template <bool SIGNED> DEVICE void mma_bytes(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (SIGNED) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}
// 16 columns of a, unsigned: rows g and g + 8 at columns 4t .. 4t + 3.
DEVICE void mma_bytes_16(i32 (&c)[4], u32 low, u32 high, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(low), "r"(high), "r"(b));
}

// Loads of memory that nobody writes while the kernel runs; the pointer is aligned to the size.
DEVICE uint4 load16(const void* from) { return __ldg(static_cast<const uint4*>(from)); }
DEVICE uint2 load8(const void* from) { return __ldg(static_cast<const uint2*>(from)); }
DEVICE u32 load4(const void* from) { return __ldg(static_cast<const u32*>(from)); }
DEVICE u32 load2(const void* from) { return __ldg(static_cast<const u16*>(from)); }

// Loads past the first-level cache, not moved over a barrier: they see what other blocks wrote before arrived_last(), and what
// an earlier kernel wrote that has ended.
DEVICE float load4f_cg(const float* from) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(__cvta_generic_to_global(from)) : "memory");
    return v;
}
DEVICE i32 load4_cg(const i32* from) {
    i32 v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(from)) : "memory");
    return v;
}
DEVICE i64 load8_cg(const i64* from) {
    i64 v;
    asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(from)) : "memory");
    return v;
}

// Copies to shared memory behind the thread's back, 16 bytes each, both ends aligned; commit_async() closes a group of
// them, wait_async<n>() waits until at most the n latest groups of this thread are on their way. Past the first-level cache.
DEVICE void copy16_async(void* shared, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(static_cast<u32>(__cvta_generic_to_shared(shared))), "l"(__cvta_generic_to_global(from)) : "memory");
}
// Asks for the 32 bytes at an address to come into the second-level cache.
DEVICE void prefetch32(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(__cvta_generic_to_global(at))); }
DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_async() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// Byte i of the result: byte (nibble i of the selector) & 7 of {a, b}, a first; its sign in all bits where the nibble has 8.
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}
// The low word of {high, low} >> bits % 32.
DEVICE u32 funnel_r(u32 low, u32 high, int bits) { return __funnelshift_r(low, high, bits); }

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_u32(float value) { return __float_as_uint(value); }
DEVICE float bf16_to_float(u32 low16) { return __uint_as_float(low16 << 16); }
DEVICE float half_to_float(u32 low16) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(low16)));
    return value;
}
DEVICE u32 pack_bf16(float low, float high) {  // to nearest, ties to even
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
DEVICE u32 sub_bf16(u32 a, u32 b) {  // both halves of a word: a - b, as a + b * -1 (sm_86 has no other)
    u32 difference;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xBF80BF80u), "r"(a));
    return difference;
}
DEVICE u32 and_or(u32 a, u32 mask, u32 base) {  // a & mask | base, in one instruction
    u32 value;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(value) : "r"(a), "r"(mask), "r"(base));
    return value;
}
DEVICE u32 in_register(u32 constant) {  // an instruction has room for one constant: this one does not take it
    asm("mov.b32 %0, %0;" : "+r"(constant));
    return constant;
}
DEVICE int count_ones(u32 bits) { return __popc(bits); }
DEVICE int lowest_one(u32 bits) { return __ffs(static_cast<int>(bits)) - 1; }
DEVICE float exp_of(float x) { return expf(x); }
DEVICE float rsqrt_of(float x) { return rsqrtf(x); }
DEVICE float reciprocal_of(float x) {  // within one unit of the last place; zero for x from 2^126 on
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// True in every thread of the last of `n` blocks that come here; that block sees what the others wrote before, through
// the _cg loads, and the counter is 0 again. All threads of a block must call it.
DEVICE bool arrived_last(i32* counter, i32 n) {
    __syncthreads();
    int last = 0;
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                     : "=r"(before) : "l"(__cvta_generic_to_global(counter)) : "memory");
        last = before == n - 1;
        if (last) *counter = 0;
    }
    return __syncthreads_or(last);
}

// For launches that may begin before the previous kernel of the stream has ended (sm_90; elsewhere they never do).
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
