// Kernels of amx_products.h: register blocking of two tiles of rows by the two tiles of a panel.
#include "products/amx_products.h"

#include "guard.h"
#include "products/amx_registers.h"

#if VLM_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vlm {

#if VLM_AMX

namespace {

static_assert(PANEL == 32 && TILE_ROWS == 16 && TILE_DEPTH == 32, "what registers hold");

constexpr int64_t L1_BLOCKS = 16;  // blocks of a panel's part that stays in the L1 cache
constexpr int64_t MANY_PAIRS = 3;  // pairs of tiles from which on prefetching such a part pays off
constexpr int64_t BLOCK_BYTES = TILE_DEPTH * PANEL * 2;

// Linux grants tile registers to a process that requests them.
bool request_amx() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

const bool amx_granted = request_amx();

// Operand of the instruction that configures the tiles.
struct TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Prefetches half a block, line by line.
VLM_INLINE void prefetch_half_block(const char* at) {
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK_BYTES / 2; i += 64) prefetch_line(at + i);
}

// Runs the epilogue of the last complete pair of tiles while the next pair is multiplied: the
// vector units are idle then, and the stores reach the memory at a steady rate.
class DeferredEpilogue {
  public:
    // Blocks that are multiplied between two calls of the epilogue.
    static constexpr int64_t BLOCKS = 8;

    explicit DeferredEpilogue(const Epilogue* epilogue) : epilogue_(epilogue) {}
    ~DeferredEpilogue() { run(pending_); }
    DeferredEpilogue(const DeferredEpilogue&) = delete;
    DeferredEpilogue& operator=(const DeferredEpilogue&) = delete;

    explicit operator bool() const { return epilogue_; }

    // Returns the buffer for the next pair's results. It is close to the one before, to stay in the
    // cache.
    float* buffer() { return buffers_[next_]; }

    // Takes over the filled buffer: `rows` rows of a panel, starting at `row`.
    void push(int64_t panel, int64_t row, int64_t rows) {
        run(pending_);
        panel_ = panel, row_ = row, pending_ = rows;
        results_ = buffer();
        next_ = !next_;
    }

    // Returns how many rows each call must process to be done after so many blocks.
    int64_t rows_per_call(int64_t blocks) const {
        return (pending_ * BLOCKS + blocks - 1) / blocks;
    }

    VLM_INLINE void run(int64_t rows) {
        rows = std::min(rows, pending_);
        if (rows == 0) return;
        (*epilogue_)(panel_, row_, rows, results_);
        results_ += rows * PANEL;
        row_ += rows;
        pending_ -= rows;
    }

  private:
    const Epilogue* epilogue_;
    int64_t panel_ = 0, row_ = 0, pending_ = 0;
    float* results_ = nullptr;
    bool next_ = false;
    alignas(64) float buffers_[2][2 * TILE_ROWS * PANEL];
};

// Multiplies some blocks of a panel by one or two tiles of rows, which are `apart` bytes from each
// other. Every block prefetches `prefetched` bytes from `next` on. If MEMORY_BOUND, it prefetches a
// whole block in two halves, between the tile loads, and runs no epilogue. Accumulators start with
// the values at `from`, or at zero if that is null.
template <bool TWO, bool MEMORY_BOUND>
void tile_blocks(const char* rows, int64_t row_bytes, int64_t apart, const char* columns,
                 int64_t blocks, const char* next, int64_t prefetched, DeferredEpilogue& epilogue,
                 const float* from, float* to) {
    constexpr int64_t COLUMN_BYTES = PANEL * 4;
    if (from)
        TileAccumulators<TWO>::load(from);
    else
        TileAccumulators<TWO>::clear();
    const int64_t share = epilogue.rows_per_call(blocks);
    for (int64_t block = 0; block < blocks; ++block) {
        for (const char* end = next + prefetched; !MEMORY_BOUND && next < end; next += 64)
            __builtin_prefetch(next, 0, WEIGHT_CACHE);
        _tile_loadd(6, columns, COLUMN_BYTES);
        if (MEMORY_BOUND) prefetch_half_block(next);
        // Stream the rows, so that they do not evict the panel's part from the L1 cache.
        if (TWO)
            _tile_stream_loadd(4, rows, 64);
        else
            _tile_loadd(4, rows, 64);
        _tile_loadd(7, columns + 64, COLUMN_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO) _tile_stream_loadd(5, rows + apart, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) _tile_dpbf16ps(2, 5, 6);
        if (TWO) _tile_dpbf16ps(3, 5, 7);
        if (MEMORY_BOUND) prefetch_half_block(next + BLOCK_BYTES / 2);
        if (MEMORY_BOUND) next += BLOCK_BYTES;
        if (!MEMORY_BOUND && block % DeferredEpilogue::BLOCKS == DeferredEpilogue::BLOCKS - 1)
            epilogue.run(share);
        columns += BLOCK_BYTES;
        rows += row_bytes;
    }
    TileAccumulators<TWO>::store(to);
}

}  // namespace

TileRegisters::TileRegisters(int64_t rows, int64_t bytes) {
    if (!amx_granted) throw std::runtime_error("no tile registers");
    alignas(64) TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.row_bytes[i] = i == 4 || i == 5 ? bytes : 64;
        config.rows[i] = i < 6 ? rows : bytes / 4;
    }
    compiler_fence();
    _tile_loadconfig(&config);
}

namespace {

// Returns how many blocks stay in the L1 cache for all pairs of tiles. With few pairs, half of the
// cache is left for the next part.
constexpr int64_t l1_blocks(int64_t pairs) {
    return pairs < MANY_PAIRS ? L1_BLOCKS / 2 : L1_BLOCKS;
}

// Multiplies panel `p` of a run.
void multiply_panel(const Weight& weight, const Panels& panels, int64_t p, const Operand& x,
                    float* results, DeferredEpilogue& epilogue) {
    const int64_t depth = padded(weight.depth, BFLOAT16);
    const int64_t whole = depth / TILE_DEPTH, blocks = tile_steps(depth);
    const char* panel = panel_at(weight, panels.first + p);
    alignas(64) char rest[BLOCK_BYTES];
    if (blocks > whole) {
        const int64_t bytes = (depth - whole * TILE_DEPTH) * PANEL * 2;
        std::memcpy(rest, panel + whole * BLOCK_BYTES, bytes);
        std::memset(rest + bytes, 0, BLOCK_BYTES - bytes);
        TileRegisters::compiler_fence();
    }
    const int64_t pairs = (x.tiles() + 1) / 2, row_bytes = rows_of_tile(x) * 64;
    const int64_t most = pairs == 1 ? whole : l1_blocks(pairs);
    const int64_t prefetched = (BLOCK_BYTES / 64 + pairs - 1) / pairs * 64;
    for (int64_t begin = 0; begin < blocks;) {
        const bool last = begin == whole, memory_bound = x.tiles() == 1 && !last;
        const char* columns = last ? rest : panel + begin * BLOCK_BYTES;
        const int64_t count = last ? 1 : std::min(most, whole - begin);
        const bool ends = begin + count == blocks;
        // With several pairs of tiles this part stays in the cache, so prefetch the next part.
        const char* next = columns + (pairs == 1 ? WEIGHT_PREFETCH_DISTANCE : count * BLOCK_BYTES);
        for (int64_t pair = 0; pair < pairs; ++pair, next += count * prefetched) {
            const int64_t first = 2 * pair * TILE_ROWS;
            const char* rows = (const char*)x.tile(2 * pair) + begin * row_bytes;
            const bool two = 2 * pair + 1 < x.tiles();
            float* own = results + first * PANEL;
            const auto kernel = two            ? tile_blocks<true, false>
                                : memory_bound ? tile_blocks<false, true>
                                               : tile_blocks<false, false>;
            kernel(rows, row_bytes, x.tile_bytes(), columns, count, next, last ? 0 : prefetched,
                   epilogue, begin == 0 ? nullptr : own,
                   epilogue && ends ? epilogue.buffer() : own);
            if (epilogue && ends)
                epilogue.push(p, first, std::min(2 * TILE_ROWS, x.rows() - first));
        }
        begin += count;
    }
}

}  // namespace

void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* results) {
    const TileRegisters registers(rows_of_tile(x), 64);
    DeferredEpilogue none(nullptr);
    for (int64_t p = 0; p < panels.count; ++p, results += x.rows() * PANEL)
        multiply_panel(weight, panels, p, x, results, none);
}

void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* scratch,
                    const Epilogue& epilogue) {
    const TileRegisters registers(rows_of_tile(x), 64);
    DeferredEpilogue deferred(&epilogue);
    for (int64_t p = 0; p < panels.count; ++p)
        multiply_panel(weight, panels, p, x, scratch, deferred);
}

#else

void multiply_tiles(const Weight&, const Panels&, const Operand&, float*) {}
void multiply_tiles(const Weight&, const Panels&, const Operand&, float*, const Epilogue&) {}

#endif

}  // namespace vlm
