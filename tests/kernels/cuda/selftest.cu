// Kernels that test the emulation and the compiler: each exercises one thing that the real kernels rely on.
#include "lanes.cuh"

// c[16, 8] += a[16, 16] b[16, 8]; a and b are bf16, b by columns.
KERNEL(32) product_kernel(float* c, const u16* a, const u16* b) {
    int g = thread_x() / 4, t = thread_x() % 4;
    u32 left[4];
    for (int i = 0; i < 4; i++) left[i] = load4(a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8);
    float sums[4];
    for (int i = 0; i < 4; i++) sums[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_bf16(sums, left, load4(b + g * 16 + 2 * t), load4(b + g * 16 + 2 * t + 8));
    for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

// c[16, 8] += a[16, 32] b[32, 8], bytes, b by columns; the first of `c` unsigned times signed, the second signed times signed,
// the third of the first 16 columns alone.
KERNEL(32) bytes_kernel(i32* c, const u8* a, const u8* b) {
    int g = thread_x() / 4, t = thread_x() % 4;
    u32 left[4];
    for (int i = 0; i < 4; i++) left[i] = load4(a + (g + i % 2 * 8) * 32 + 4 * t + i / 2 * 16);
    const u32 right[2] = {load4(b + g * 32 + 4 * t), load4(b + g * 32 + 4 * t + 16)};
    i32 sums[3][4];
    for (int of = 0; of < 3; of++)
        for (int i = 0; i < 4; i++) sums[of][i] = c[of * 128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_bytes<false>(sums[0], left, right[0], right[1]);
    mma_bytes<true>(sums[1], left, right[0], right[1]);
    mma_bytes_16(sums[2], left[0], left[1], right[0]);
    for (int of = 0; of < 3; of++)
        for (int i = 0; i < 4; i++) c[of * 128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[of][i];
}

// out[i] = sum over lanes by shfl_xor; out[n + i] = the value of lane `lane` by shfl; out[2 n + i] = the largest of the lanes'.
KERNEL(128) shuffle_kernel(float* out, const float* in, int n, int lane) {
    int i = thread_x();
    float sum = in[i];
    for (int mask = 1; mask < 32; mask *= 2) sum += shfl_xor(sum, mask);
    out[i] = sum;
    out[n + i] = as_float(shfl(as_u32(in[i]), lane));
    out[2 * n + i] = as_float(max_of_warp(as_u32(in[i])));
}

// Each block sums its part through shared memory; the last block to come adds the parts in order.
template <int THREADS> KERNEL(THREADS) sum_kernel(float* total, float* parts, i32* counter, const float* in, i64 n) {
    float* shared = reinterpret_cast<float*>(shared_bytes());
    i64 i = static_cast<i64>(block_x()) * THREADS + thread_x();
    shared[thread_x()] = i < n ? in[i] : 0.0f;
    for (int half = THREADS / 2; half; half /= 2) {
        sync_block();
        if (thread_x() < half) shared[thread_x()] += shared[thread_x() + half];
    }
    if (thread_x() == 0) parts[block_x()] = shared[0];
    if (arrived_last(counter, n_blocks_x()) && thread_x() == 0) {
        float sum = 0.0f;
        for (int k = 0; k < n_blocks_x(); k++) sum += load4f_cg(parts + k);
        *total = sum;
    }
}

// out[i, :] = what the conversions and bit operations make of words[i].
KERNEL(32) convert_kernel(u32* out, const u32* words, int n, float scale) {
    for (int i = thread_x(); i < n; i += n_threads()) {
        u32 word = load4(words + i);
        u32* row = out + i * 9;
        row[0] = as_u32(half_to_float(word & 0xffff));
        row[1] = as_u32(bf16_to_float(word & 0xffff));
        row[2] = pack_bf16(as_float(word), scale);
        row[3] = prmt(word, ~word, word >> 7);
        row[4] = funnel_r(word, ~word, word % 32);
        row[5] = load2(words + i);
        row[6] = as_u32(exp_of(scale * (word & 0xffff)));
        row[7] = as_u32(rsqrt_of(1.0f + (word & 0xffff)));
        row[8] = sub_bf16(word, 0x40004380u);  // 2 and 256
    }
}

// Two groups of copies ahead: out[i] = in[i] + in[i + 512], then what the shared memory of the second group holds too early.
KERNEL(32) copy_kernel(u32* out, const u32* in) {
    u32* shared = reinterpret_cast<u32*>(shared_bytes());
    for (int group = 0; group < 2; group++) {
        for (int i = 0; i < 4; i++) {
            int at = group * 512 + i * 128 + thread_x() * 4;
            copy16_async(shared + at, in + at);
        }
        commit_async();
    }
    wait_async<1>();
    sync_warp();
    for (int i = thread_x(); i < 512; i += 32) out[i] = shared[511 - i];
    wait_async<0>();
    sync_warp();
    for (int i = thread_x(); i < 512; i += 32) out[i] += shared[512 + i];
}

// One fault of a kernel each.
template <int FAULT> KERNEL(64) faulty_kernel(u32* out, int n) {
    u32* shared = reinterpret_cast<u32*>(shared_bytes());
    if (FAULT == 0 && thread_x() < 40) sync_block();          // some never come
    if (FAULT == 1 && thread_x() % 2) sync_warp();            // lanes at two operations
    if (FAULT == 1 && thread_x() % 2 == 0) shfl(1.0f, 0);
    if (FAULT == 2) shared[n + thread_x()] = 1;               // beyond its shared memory
    if (FAULT == 3) out[n + thread_x()] = 1;                  // beyond an array
    if (FAULT == 4) out[0] = load16(reinterpret_cast<u8*>(out) + 4 * n).x;
    if (FAULT == 5) *reinterpret_cast<uint2*>(reinterpret_cast<u8*>(shared) + 4 * n) = {1, 2};
    if (FAULT == 6) out[0] = 1u << n;
    if (FAULT == 7) {                                         // reads what another thread writes, no barrier between
        shared[thread_x()] = thread_x();
        out[thread_x()] = shared[63 - thread_x()];
    }
    if (FAULT == 8) {                                         // does not wait for its copy
        copy16_async(shared + 4 * (thread_x() % 8), out);
        commit_async();
        out[thread_x()] = shared[thread_x() % 32];
    }
}

// One step of a sequence, each from the one before, by another thread than wrote it.
KERNEL(256) chain_kernel(i32* values, i32 n, i32 step) {
    let_next_start();
    wait_for_previous();
    int i = block_x() * 256 + thread_x();
    if (step % 2) i = n - 1 - i;
    values[i] = (values[i] * 5 + step) % 65536;
}

// Many warp operations, to time.
KERNEL(256) busy_kernel(float* out, int n) {
    float sums[4] = {0, 0, 0, 0};
    u32 left[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    for (int i = 0; i < n; i++) {
        mma_bf16(sums, left, 0x3f803f80, 0x3f803f80);
        sums[0] = shfl_xor(sums[0], 1);
    }
    out[block_x() * 256 + thread_x()] = sums[0];
}
