// The experts of a layer's step: gate, up and SwiGLU of each entry, then down and the weighted sum over entries.
//
// An entry is one expert for all rows that chose it; where its bytes are and who chose it was planned before
// (kernels/triton/step_plan.py). Between the two kernels lie the hidden values, f32 [entry][row][width], of the rows that chose
// the entry.

#include "product.cuh"

// The i-th row that chose an entry.
DEVICE int chosen(u32 mask, int i) {
    for (; i > 0; i--) mask &= mask - 1;
    return lowest_one(mask);
}

// Rows of a pass into a warp's columns: of those that chose an entry, from the `first` on; `x` f32, `stride` apart.
template <int UK>
DEVICE void put_chosen(const Activations<UK>& activations, const float* x, int stride, u32 mask, int first, int lane) {
    activations.template put<false>(lane, [&](int i) {
        const float* row = x + chosen(mask, first + i) * stride;
        return [row](int column, float* v) { load_four(row + column, v); };
    });
}

// Tiles of 16 rows of an entry's gate and up products, every n_blocks_x()-th, and SwiGLU. Grid: blocks x entries; a warp for
// each unit of the columns. Without LOOPS (the buffers for sums, 1 or 2) a block has one tile. PASS: rows that are multiplied
// together, 1 or 2, of a step's n.
// It waits before it lets the next kernel start, so when that one starts, the plan has been made.
template <int GATE, int UP, int UK, int LOOPS, int UNITS, int PASS, int BLOCKS>
KERNEL(UNITS * 32, BLOCKS)
gate_up_kernel(const float* x, i32 x_stride, const u8* arena, const i32* experts, const i64* offsets,
               const i32* chosen_by, i32 gate_bytes, i32 up_bytes, i64 up_at, float* hidden, i32 n, i32 width) {
    constexpr int OF_WARP = Layout<UK>::bytes(PASS), SUMS = UNITS * 2 * RED;  // [warp][gate, up]
    const int lane = thread_x() % LANES, warp = thread_x() / LANES, n_tiles = width / ROWS, entry = block_y();
    float* red = reinterpret_cast<float*>(shared_bytes() + UNITS * OF_WARP);
    u8* copy = reinterpret_cast<u8*>(red + (LOOPS == 2 ? 2 : 1) * SUMS) + warp * (Unit<GATE, UK>::COPY + Unit<UP, UK>::COPY);

    wait_for_previous();
    let_next_start();
    const u8* expert = arena + offsets[entry];
    const u32 mask = PASS == 1 ? 1u : static_cast<u32>(chosen_by[entry]);
    if (experts[entry] < 0) return;
    const int n_chosen = PASS == 1 ? 1 : count_ones(mask);
    const Unit<GATE, UK> gate{expert + warp * (UK / Block<GATE>::COLUMNS * Block<GATE>::BYTES), static_cast<u32>(gate_bytes),
                              width, copy};
    const Unit<UP, UK> up{expert + up_at + warp * (UK / Block<UP>::COLUMNS * Block<UP>::BYTES), static_cast<u32>(up_bytes),
                          width, copy + Unit<GATE, UK>::COPY};

    int turn = 0;
    for (int first = 0; first < n_chosen; first += PASS) {
        const int count = PASS == 1 ? 1 : min(n_chosen - first, PASS);
        gate.fetch(block_x(), lane);
        up.fetch(block_x(), lane);
        const Activations<UK> activations{shared_bytes() + warp * OF_WARP, count};
        put_chosen(activations, x + warp * UK, x_stride, mask, first, lane);
        Columns gate_view[1], up_view[1];
        lane_view<GATE, UK, 1>(gate_view, activations, lane / 4, lane % 4);
        lane_view<UP, UK, 1>(up_view, activations, lane / 4, lane % 4);
        for (int tile = block_x(); tile < n_tiles; tile = LOOPS ? tile + n_blocks_x() : n_tiles) {
            const int next = tile + n_blocks_x();
            const bool has_next = LOOPS && next < n_tiles;
            float* all = red + turn * SUMS;
            float total[1][4] = {}, other[1][4] = {};
            gate.template multiply_into<1>(total, gate_view, tile, lane);
            if (has_next) gate.fetch(next, lane);
            else commit_async();
            up.template multiply_into<1>(other, up_view, tile, lane);
            if (has_next) up.fetch(next, lane);
            put_sums<1>(all + warp * 2 * RED, total, lane / 4, lane % 4);
            put_sums<1>(all + warp * 2 * RED + RED, other, lane / 4, lane % 4);
            sync_block();
            for (int i = thread_x(); i < count * ROWS; i += UNITS * LANES) {
                const float a = sum_of_parts<UNITS, 2 * RED>(all, i / ROWS, i % ROWS);
                const float b = sum_of_parts<UNITS, 2 * RED>(all + RED, i / ROWS, i % ROWS);
                hidden[(entry * n + (PASS == 1 ? 0 : chosen(mask, first + i / ROWS))) * width + tile * ROWS + i % ROWS] =
                    a * reciprocal_of(1.0f + exp_of(-a)) * b;
            }
            if (LOOPS == 2) turn ^= 1;  // others may still read what was added last
            else if (has_next) sync_block();
        }
        if (first + PASS < n_chosen && LOOPS < 2) sync_block();
    }
}

// One tile of 16 rows of the outputs of all entries, added in ascending order to acc f32 [n, n_rows]. Grid: tiles. PER_ENTRY
// warps have an entry at a time, AT_ONCE entries in a turn, and share the UNITS of its columns; COPIES units of a warp are on
// their way at once.
// What the plan wrote, and the entries' bytes, are read before the kernels before have ended: see gate_up_kernel.
template <int KIND, int UK, int UNITS, int PER_ENTRY, int AT_ONCE, int COPIES, int PASS, int PASSES, int BLOCKS>
KERNEL(PER_ENTRY * AT_ONCE * 32, BLOCKS)
down_kernel(const float* hidden, const u8* arena, const i64* offsets, const i32* chosen_by, const float* weights,
            const i32* n_entries, i32 row_bytes, i64 down_at, float* acc, i32 n, i32 n_rows) {
    constexpr int WARPS = PER_ENTRY * AT_ONCE, OF_WARP = Layout<UK>::bytes(PASS), WIDTH = UNITS * UK, MOST_N = PASS * PASSES;
    constexpr int UNIT_BYTES = UK / Block<KIND>::COLUMNS * Block<KIND>::BYTES, COPY = Unit<KIND, UK>::COPY;
    constexpr int OF_TURN = (UNITS + PER_ENTRY - 1) / PER_ENTRY;         // units of a warp in a turn
    constexpr int AHEAD = (OF_TURN - 1 + COPIES) / OF_TURN;              // turns whose units are fetched, besides the current
    constexpr int ITEMS = (AT_ONCE * MOST_N + WARPS * 2 - 1) / (WARPS * 2);  // sums of an entry for a row, of a thread
    const int lane = thread_x() % LANES, warp = thread_x() / LANES, tile = block_x();
    const int group = warp / PER_ENTRY, in_group = warp % PER_ENTRY;
    float* red = reinterpret_cast<float*>(shared_bytes() + WARPS * OF_WARP);  // [warp][pass]
    float* outputs = red + WARPS * PASSES * RED;                              // [group][row of the step][row]
    u8* copies = reinterpret_cast<u8*>(outputs + AT_ONCE * MOST_N * ROWS) + warp * COPIES * COPY;

    const int count = load4_cg(n_entries);
    // This warp's entry of a turn: where its bytes are and who chose it.
    const auto offset_of = [&](int turn) {
        const int entry = group + turn * AT_ONCE;
        return entry < count ? load8_cg(offsets + entry) : static_cast<i64>(0);
    };
    const auto mask_of = [&](int turn) {
        const int entry = group + turn * AT_ONCE;
        return PASS == 1 ? 1u : entry < count ? static_cast<u32>(load4_cg(chosen_by + entry)) : 0u;
    };
    const auto unit_of = [&](i64 offset, int number, int copy) {
        return Unit<KIND, UK>{arena + offset + down_at + (in_group + number * PER_ENTRY) * UNIT_BYTES,
                              static_cast<u32>(row_bytes), n_rows, copies + copy * COPY};
    };
    const auto fetch = [&](int turn, i64 offset, int number) {
        const bool is_there = UNITS % PER_ENTRY == 0 || in_group + number * PER_ENTRY < UNITS;
        if (is_there && group + turn * AT_ONCE < count)
            unit_of(offset, number, (turn * OF_TURN + number) % COPIES).fetch(tile, lane);
        else commit_async();
    };
    i64 offset[AHEAD + 1];
#pragma unroll
    for (int i = 0; i <= AHEAD; i++) offset[i] = offset_of(i);
    u32 mask = mask_of(0);
#pragma unroll
    for (int q = 0; q < COPIES; q++) fetch(q / OF_TURN, offset[q / OF_TURN], q % OF_TURN);

    const int row = thread_x() % ROWS, of = thread_x() / ROWS;
    const bool adds = of < n && tile * ROWS + row < n_rows;
    float* target = acc + of * n_rows + tile * ROWS + row;
    wait_for_previous();
    let_next_start();
    float sum = adds ? *target : 0.0f;

    for (int turn = 0; turn * AT_ONCE < count; turn++) {
        const int begin = turn * AT_ONCE, entry = begin + group, n_here = min(count - begin, AT_ONCE);
        // On their way while the products are made: what the sums are multiplied by, and the next entry.
        u32 by[ITEMS];
        float weight[ITEMS];
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int i = of + k * WARPS * 2, j = i / MOST_N;
            by[k] = j >= n_here ? 0 : PASS == 1 ? 1 : static_cast<u32>(load4_cg(chosen_by + begin + j));
            weight[k] = j >= n_here ? 0.0f : load4f_cg(weights + (begin + j) * 8 + i % MOST_N);
        }
        const u32 next_mask = mask_of(turn + 1);
        const i64 last_offset = offset_of(turn + AHEAD + 1);
#pragma unroll 1
        for (int number = 0; number < OF_TURN; number++) {
            const int unit = in_group + number * PER_ENTRY;
            const bool is_there = UNITS % PER_ENTRY == 0 || unit < UNITS;
            const int n_chosen = entry < count && is_there ? count_ones(mask) : 0;
#pragma unroll 1
            for (int pass = 0; pass * PASS < n_chosen; pass++) {
                const Activations<UK> activations{shared_bytes() + warp * OF_WARP,
                                                  PASS == 1 ? 1 : min(n_chosen - pass * PASS, PASS)};
                put_chosen(activations, hidden + entry * n * WIDTH + unit * UK, WIDTH, mask, pass * PASS, lane);
                Columns x[1];
                lane_view<KIND, UK, 1>(x, activations, lane / 4, lane % 4);
                float total[1][4] = {};
                unit_of(offset[0], number, (turn * OF_TURN + number) % COPIES)
                    .template multiply_into<COPIES - 1>(total, x, tile, lane);
                float* sums = red + (warp * PASSES + pass) * RED;
                if (number == 0) put_sums<1>(sums, total, lane / 4, lane % 4);
                else add_sums<1>(sums, total, lane / 4, lane % 4);
            }
            const int later = (number + COPIES) / OF_TURN;  // turns on
            i64 at = offset[0];
#pragma unroll
            for (int i = 1; i <= AHEAD; i++) at = later == i ? offset[i] : at;
            fetch(turn + later, at, (number + COPIES) % OF_TURN);
        }
        sync_block();
        // What each entry adds to each row; then those in order.
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int i = of + k * WARPS * 2, j = i / MOST_N, to = i % MOST_N;
            float output = -0.0f;  // adds nothing to any number
            if ((by[k] >> to) & 1) {
                const int index = PASS == 1 ? 0 : count_ones(by[k] & ((1u << to) - 1));
                const float* part = red + (j * PER_ENTRY * PASSES + index / PASS) * RED;
                output = sum_of_parts<PER_ENTRY, PASSES * RED>(part, index % PASS, row) * weight[k];
            }
            if (j < AT_ONCE) outputs[i * ROWS + row] = output;
        }
        sync_block();
        if (adds) {
            float parts[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) parts[j] = outputs[(j * MOST_N + of) * ROWS + row];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) sum += parts[j];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) offset[i] = offset[i + 1];
        offset[AHEAD] = last_offset;
        mask = next_mask;
    }
    if (adds) *target = sum;
}
