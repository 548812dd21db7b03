// The kernels of amx_products.h: two tiles of rows times the two of a panel, sums in registers.
#include "products/amx_products.h"

#include "guard.h"
#include "products/amx_registers.h"

#if VLM_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vlm {

#if VLM_TILES

namespace {

static_assert(PANEL == 32 && TILE_ROWS == 16 && TILE_DEPTH == 32, "what registers hold");

constexpr int64_t TILE_BLOCKS = 16;  // of a panel's part that stays in the L1 cache
constexpr int64_t MANY_PAIRS = 3;    // of tiles that make it worth to fetch such a part
constexpr int64_t BLOCK_BYTES = TILE_DEPTH * PANEL * 2;

// Linux gives a process such registers when it asks for them.
bool ask_for_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

const bool have_tiles = ask_for_tiles();

// What the processor reads.
struct Shape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Half a block, line by line.
VLM_INLINE void ask_for_half(const char* at) {
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK_BYTES / 2; i += 64) ask_for_line(at + i);
}

// The last pair of tiles whose sums are complete, which is handed on while the next one is
// multiplied: what is done with it has the rest of the processor to itself, and reaches the memory
// at a steady pace.
class HandingOn {
  public:
    // That are multiplied between two calls, each of which takes as long as some rows.
    static constexpr int64_t BLOCKS = 8;

    explicit HandingOn(const Complete* complete) : complete_(complete) {}
    ~HandingOn() { some(left_); }
    HandingOn(const HandingOn&) = delete;
    HandingOn& operator=(const HandingOn&) = delete;

    explicit operator bool() const { return complete_; }

    // Where the sums of the next pair go, close to those before.
    float* place() { return places_[next_]; }

    // It has been filled with so many rows of a panel, from `row` on.
    void filled(int64_t panel, int64_t row, int64_t rows) {
        some(left_);
        panel_ = panel, row_ = row, left_ = rows;
        sums_ = place();
        next_ = !next_;
    }

    // How many to hand on at a time to be done after so many blocks.
    int64_t share(int64_t blocks) const { return (left_ * BLOCKS + blocks - 1) / blocks; }

    VLM_INLINE void some(int64_t rows) {
        rows = std::min(rows, left_);
        if (rows == 0) return;
        (*complete_)(panel_, row_, rows, sums_);
        sums_ += rows * PANEL;
        row_ += rows;
        left_ -= rows;
    }

  private:
    const Complete* complete_;
    int64_t panel_ = 0, row_ = 0, left_ = 0;
    float* sums_ = nullptr;
    bool next_ = false;
    alignas(64) float places_[2][2 * TILE_ROWS * PANEL];
};

// Some blocks of a panel, for one or two tiles of rows that lie `apart` bytes from each other.
// Beside each, `asked` bytes from `next` on are asked for; if that is LATE, a whole block behind
// its use, and nothing is handed on. Sums begin as they are at `from`, if there are any.
template <bool TWO, bool LATE>
void tile_blocks(const char* rows, int64_t row_bytes, int64_t apart, const char* columns,
                 int64_t blocks, const char* next, int64_t asked, HandingOn& others,
                 const float* from, float* to) {
    constexpr int64_t COLUMN_BYTES = PANEL * 4;
    if (from)
        TileSums<TWO>::load(from);
    else
        TileSums<TWO>::clear();
    const int64_t share = others.share(blocks);
    for (int64_t block = 0; block < blocks; ++block) {
        for (const char* end = next + asked; !LATE && next < end; next += 64)
            __builtin_prefetch(next, 0, WEIGHT_CACHE);
        _tile_loadd(6, columns, COLUMN_BYTES);
        if (LATE) ask_for_half(next);
        // Rows that pass by shall not push the panel's part out of the L1 cache.
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
        if (LATE) ask_for_half(next + BLOCK_BYTES / 2);
        if (LATE) next += BLOCK_BYTES;
        if (!LATE && block % HandingOn::BLOCKS == HandingOn::BLOCKS - 1) others.some(share);
        columns += BLOCK_BYTES;
        rows += row_bytes;
    }
    TileSums<TWO>::store(to);
}

}  // namespace

TileRegisters::TileRegisters(int64_t rows, int64_t bytes) {
    if (!have_tiles) throw std::runtime_error("no tile registers");
    alignas(64) Shape shape;
    for (int i = 0; i < 8; ++i) {
        shape.row_bytes[i] = i == 4 || i == 5 ? bytes : 64;
        shape.rows[i] = i < 6 ? rows : bytes / 4;
    }
    written();
    _tile_loadconfig(&shape);
}

namespace {

// Panel `p` of a run.
void multiply_panel(const Weight& weight, const Panels& panels, int64_t p, const Operand& x,
                    float* sums, HandingOn& done) {
    const int64_t depth = padded(weight.depth, BFLOAT16);
    const int64_t whole = depth / TILE_DEPTH, blocks = tile_steps(depth);
    const char* panel = panel_at(weight, panels.first + p);
    alignas(64) char rest[BLOCK_BYTES];
    if (blocks > whole) {
        const int64_t bytes = (depth - whole * TILE_DEPTH) * PANEL * 2;
        std::memcpy(rest, panel + whole * BLOCK_BYTES, bytes);
        std::memset(rest + bytes, 0, BLOCK_BYTES - bytes);
        TileRegisters::written();
    }
    const int64_t pairs = (x.tiles() + 1) / 2, row_bytes = rows_of_tile(x) * 64;
    const int64_t most = pairs == 1 ? whole : pairs < MANY_PAIRS ? TILE_BLOCKS / 2 : TILE_BLOCKS;
    const int64_t asked = (BLOCK_BYTES / 64 + pairs - 1) / pairs * 64;
    for (int64_t begin = 0; begin < blocks;) {
        const bool last = begin == whole, late = x.tiles() == 1 && !last;
        const char* columns = last ? rest : panel + begin * BLOCK_BYTES;
        const int64_t count = last ? 1 : std::min(most, whole - begin);
        const bool ends = begin + count == blocks;
        // Several rows work on a part from the cache, while the next one comes.
        const char* next = columns + (pairs == 1 ? WEIGHT_AHEAD : count * BLOCK_BYTES);
        for (int64_t pair = 0; pair < pairs; ++pair, next += count * asked) {
            const int64_t first = 2 * pair * TILE_ROWS;
            const char* rows = (const char*)x.tile(2 * pair) + begin * row_bytes;
            const bool two = 2 * pair + 1 < x.tiles();
            float* own = sums + first * PANEL;
            const auto work = two    ? tile_blocks<true, false>
                              : late ? tile_blocks<false, true>
                                     : tile_blocks<false, false>;
            work(rows, row_bytes, x.tile_bytes(), columns, count, next, last ? 0 : asked, done,
                 begin == 0 ? nullptr : own, done && ends ? done.place() : own);
            if (done && ends) done.filled(p, first, std::min(2 * TILE_ROWS, x.rows() - first));
        }
        begin += count;
    }
}

}  // namespace

void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* sums) {
    const TileRegisters registers(rows_of_tile(x), 64);
    HandingOn none(nullptr);
    for (int64_t p = 0; p < panels.count; ++p, sums += x.rows() * PANEL)
        multiply_panel(weight, panels, p, x, sums, none);
}

void multiply_tiles(const Weight& weight, const Panels& panels, const Operand& x, float* room,
                    const Complete& complete) {
    const TileRegisters registers(rows_of_tile(x), 64);
    HandingOn done(&complete);
    for (int64_t p = 0; p < panels.count; ++p) multiply_panel(weight, panels, p, x, room, done);
}

#else

void multiply_tiles(const Weight&, const Panels&, const Operand&, float*) {}
void multiply_tiles(const Weight&, const Panels&, const Operand&, float*, const Complete&) {}

#endif

}  // namespace vlm
