// Codes of a table: see grouped.h.
#include "codes/grouped.h"

namespace vlm {

namespace {

constexpr int64_t TABLES_PREFETCH_DISTANCE = 4096;  // bytes

struct Table2Bytes {
    static constexpr int WORDS_PER_STEP = 1, PARTS = 4;
    static VLM_INLINE Words part(const char* step, int quarter) {
        return read<Words>(step) >> 2 * quarter & 0x03030303u;
    }
};

struct Table3Bytes {
    static constexpr int WORDS_PER_STEP = 3, PARTS = 8;
    static VLM_INLINE Words part(const char* step, int eighth) {
        constexpr int64_t WORD = PANEL * 4;
        const Words low = Table2Bytes::part(step + eighth / 4 * WORD, eighth % 4);
        return low | (read<Words>(step + 2 * WORD) >> eighth & 0x01010101u) << 2;
    }
};

template <typename Kind>
void look_up(const char* words, int64_t depth, const ByteTable& table, char* to) {
    constexpr int64_t COLUMN_BYTES = PANEL * 4;
    for (int64_t k = 0; k < depth; k += 4 * Kind::PARTS) {
#pragma GCC unroll 3
        for (int64_t line = 0; line < Kind::WORDS_PER_STEP * COLUMN_BYTES; line += 64)
            __builtin_prefetch(words + TABLES_PREFETCH_DISTANCE + line);
        for (int j = 0; j < PANEL_REGISTERS; ++j)
#pragma GCC unroll 8
            for (int part = 0; part < Kind::PARTS; ++part) {
                const int64_t at = j * sizeof(Words);
                const Words bytes = table_lookup(table, Kind::part(words + at, part));
                std::memcpy(to + part * COLUMN_BYTES + at, &bytes, sizeof bytes);
            }
        words += Kind::WORDS_PER_STEP * COLUMN_BYTES;
        to += Kind::PARTS * COLUMN_BYTES;
    }
}

}  // namespace

Weight looked_up(const Weight& weight, int64_t index, char* bytes) {
    ByteTable table;
    std::memcpy(table.bytes, weight.table, sizeof table.bytes);
    const auto look = weight.type == TABLE4   ? look_up<Int4Bytes>
                      : weight.type == TABLE3 ? look_up<Table3Bytes>
                                              : look_up<Table2Bytes>;
    look(panel_at(weight, index), weight.depth, table, bytes);
    Weight panel = weight;
    panel.type = INT8, panel.packed = bytes;
    const int64_t numbers = index * PANEL * (weight.depth / weight.group);
    panel.scales = (const char*)weight.scales + numbers * bytes_of(weight.scale_type);
    if (weight.scale_type != TWO_LEVEL) return panel;
    const int64_t above = index * PANEL * (weight.depth / weight.outer_group);
    panel.outer = (const char*)weight.outer + above * bytes_of(FLOAT16);
    return panel;
}

}  // namespace vlm
