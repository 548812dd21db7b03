// Tile registers (AMX) in memory: what processors without them include before everything else, so
// that they run the kernels that are written for those with them.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace emulated {

struct Tile {
    int64_t rows, row_bytes;
    alignas(64) uint8_t bytes[16][64];

    template <typename T>
    T at(int64_t row, int64_t i) const {
        T value;
        std::memcpy(&value, bytes[row] + i * sizeof value, sizeof value);
        return value;
    }
    template <typename T>
    void put(int64_t row, int64_t i, T value) {
        std::memcpy(bytes[row] + i * sizeof value, &value, sizeof value);
    }
};

inline thread_local Tile tiles[8];

inline void configure(const void* shape) {
    const uint8_t* from = (const uint8_t*)shape;
    for (int i = 0; i < 8; ++i) {
        uint16_t bytes;
        std::memcpy(&bytes, from + 16 + 2 * i, sizeof bytes);
        tiles[i] = Tile{from[48 + i], bytes, {}};
    }
}

inline void clear(Tile& tile) { std::memset(tile.bytes, 0, sizeof tile.bytes); }

inline void load(Tile& tile, const void* from, int64_t stride) {
    clear(tile);
    for (int64_t row = 0; row < tile.rows; ++row)
        std::memcpy(tile.bytes[row], (const char*)from + row * stride, tile.row_bytes);
}

inline void store(const Tile& tile, void* to, int64_t stride) {
    for (int64_t row = 0; row < tile.rows; ++row)
        std::memcpy((char*)to + row * stride, tile.bytes[row], tile.row_bytes);
}

// Numbers below the least normal one are zero, read or made.
inline float normal(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? 0.0f : value;
}

inline float wide(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return normal(value);
}

inline void add_pairs(Tile& sums, const Tile& a, const Tile& b) {
    for (int64_t m = 0; m < sums.rows; ++m)
        for (int64_t n = 0; n < sums.row_bytes / 4; ++n) {
            float part[2] = {};
            for (int64_t k = 0; k < a.row_bytes / 2; ++k)
                part[k % 2] =
                    normal(std::fma(wide(a.at<uint16_t>(m, k)),
                                    wide(b.at<uint16_t>(k / 2, 2 * n + k % 2)), part[k % 2]));
            const float whole = normal(part[0] + part[1]);
            sums.put(m, n, normal(normal(sums.at<float>(m, n)) + whole));
        }
}

// Sums of products of signed bytes and of those of type B.
template <typename B>
void add_bytes(Tile& sums, const Tile& a, const Tile& b) {
    for (int64_t m = 0; m < sums.rows; ++m)
        for (int64_t n = 0; n < sums.row_bytes / 4; ++n) {
            uint32_t total = sums.at<uint32_t>(m, n);
            for (int64_t k = 0; k < a.row_bytes; ++k)
                total += (uint32_t)(a.at<int8_t>(m, k) * b.at<B>(k / 4, 4 * n + k % 4));
            sums.put(m, n, total);
        }
}

}  // namespace emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(shape) emulated::configure(shape)
#define _tile_release() ((void)0)
#define _tile_zero(tile) emulated::clear(emulated::tiles[tile])
#define _tile_loadd(tile, from, stride) emulated::load(emulated::tiles[tile], from, stride)
#define _tile_stream_loadd _tile_loadd
#define _tile_stored(tile, to, stride) emulated::store(emulated::tiles[tile], to, stride)
#define _tile_dpbf16ps(sums, a, b) \
    emulated::add_pairs(emulated::tiles[sums], emulated::tiles[a], emulated::tiles[b])
#define _tile_dpbssd(sums, a, b) \
    emulated::add_bytes<int8_t>(emulated::tiles[sums], emulated::tiles[a], emulated::tiles[b])
#define _tile_dpbsud(sums, a, b) \
    emulated::add_bytes<uint8_t>(emulated::tiles[sums], emulated::tiles[a], emulated::tiles[b])
// Every request for tile registers succeeds.
#define syscall(...) 0L
