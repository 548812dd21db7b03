// What Python mirrors: one line for every struct that it hands over and every constant that it
// repeats. kernels/native_layout.py compares them with its own when the library is loaded.
//
//     VLM_STRUCT(Rows, tokens, heads, width, stride, head_stride, threads, x, out);
//     VLM_CONSTANT(LANES);
//
// stands in namespace vlm, in one source file, with all fields in their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace vlm {

struct Field {
    const char* name;
    size_t offset, size;
};

// An object of this type adds a line to what `vlm_layout` returns.
struct Mirrored {
    Mirrored(const char* name, size_t size, std::initializer_list<Field> fields);
    Mirrored(const char* name, int64_t value);
};

}  // namespace vlm

#define VLM_STRUCT(S, ...) \
    static const ::vlm::Mirrored mirrored_##S(#S, sizeof(S), {VLM_SCAN(VLM_FIELDS(S, __VA_ARGS__))})
#define VLM_CONSTANT(C) static const ::vlm::Mirrored mirrored_##C(#C, C)

// One `Field` for each name. A macro may not call itself, so every scan of the result expands
// VLM_MORE once: 64 scans are for as many fields.
#define VLM_FIELDS(S, field, ...) \
    {#field, offsetof(S, field), sizeof(S::field)} __VA_OPT__(, VLM_MORE VLM_NONE(S, __VA_ARGS__))
#define VLM_MORE() VLM_FIELDS
#define VLM_NONE ()
#define VLM_SCAN(...) VLM_SCAN_16(VLM_SCAN_16(VLM_SCAN_16(VLM_SCAN_16(__VA_ARGS__))))
#define VLM_SCAN_16(...) VLM_SCAN_4(VLM_SCAN_4(VLM_SCAN_4(VLM_SCAN_4(__VA_ARGS__))))
#define VLM_SCAN_4(...) VLM_SCAN_1(VLM_SCAN_1(VLM_SCAN_1(VLM_SCAN_1(__VA_ARGS__))))
#define VLM_SCAN_1(...) __VA_ARGS__
