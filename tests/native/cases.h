// What the cases of the native test program share: seeded inputs, digests of results, the report.
//
// Inputs come from whole numbers alone, so that they are the same on every machine. The structs
// that kernels take are made with the names of all of their fields, in order: the program is
// compiled with -Werror=missing-field-initializers, so that a struct that changes does not compile.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "attention/kv_pages.h"
#include "vectors.h"

namespace cases {

using vlm::bf16;
using vlm::code8;
using vlm::float8;

// SplitMix64, begun with a name.
class Random {
  public:
    explicit Random(const std::string& name) {
        for (char c : name) state_ = (state_ ^ (uint8_t)c) * 0x100000001b3;
    }

    uint64_t word() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }

    int64_t below(int64_t count) { return (int64_t)(word() >> 33) % count; }

    // One of 2^24 numbers from -scale on and below scale.
    float number(float scale) { return ((int64_t)(word() >> 40) - (1 << 23)) * 0x1p-23f * scale; }

    template <typename T = float>
    std::vector<T> numbers(int64_t count, float scale = 1.0f, float centre = 0.0f) {
        std::vector<T> all(count);
        for (T& each : all) vlm::store_one(&each, centre + number(scale));
        return all;
    }

  private:
    uint64_t state_ = 0xcbf29ce484222325;
};

// Of the bits of numbers. Every NaN counts as the same: processors differ in the sign and the
// payload of those that they make.
class Digest {
  public:
    template <typename T>
    Digest& add(const std::vector<T>& values) {
        for (const T& value : values) add_word(bits_of(value));
        return *this;
    }

    uint64_t value() const { return value_; }

  private:
    static uint64_t bits_of(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return value != value ? 0x7fc00000 : bits;
    }
    static uint64_t bits_of(bf16 value) {
        return (value.bits & 0x7fff) > 0x7f80 ? 0x7fc0 : value.bits;
    }
    static uint64_t bits_of(int64_t value) { return value; }
    static uint64_t bits_of(vlm::f16 value) { return value.bits; }
    static uint64_t bits_of(vlm::float8 value) { return value.bits; }
    static uint64_t bits_of(vlm::code8 value) { return value.bits; }

    void add_word(uint64_t word) {
        value_ = (value_ ^ word) * 0x9e3779b97f4a7c15;
        value_ ^= value_ >> 32;
    }

    uint64_t value_ = 0;
};

template <typename T>
bool alike(const std::vector<T>& a, const std::vector<T>& b) {
    return Digest().add(a).value() == Digest().add(b).value();
}

template <typename T>
std::vector<T> part(const std::vector<T>& values, int64_t first, int64_t count) {
    return {values.begin() + first, values.begin() + first + count};
}

// The bits of activations of T, as kernels take them; `report` names the type.
template <typename T>
constexpr int64_t BITS = 8 * sizeof(T);

// Prints the digest of what `run` returns for one thread; two and three must have the same.
void report(int64_t bits, const std::string& name, const std::function<Digest(int64_t)>& run);

// Prints a line that the runner counts as a failure unless two results are alike.
void expect(bool alike, int64_t bits, const std::string& name, const std::string& what);

// Ends the program if a kernel has failed.
void must(int64_t result, const char* kernel);

// Some tokens of a sequence that go through a call together; the rows of its state before and after
// them, for kernels that have one.
struct Slice {
    int64_t sequence, first, count, src = -1, dst = -1;
};

// Rows for the tokens of every sequence, and those of some slices next to each other.
template <typename T>
struct Table {
    int64_t tokens, width;  // of a sequence; of a row
    std::vector<T> values;

    Table(Random& random, int64_t sequences, int64_t most, int64_t wide, float scale = 1.0f)
        : tokens(most), width(wide), values(random.numbers<T>(sequences * most * wide, scale)) {}

    std::vector<T> of(const std::vector<Slice>& slices) const {
        std::vector<T> rows;
        for (const Slice& slice : slices) {
            const auto from = values.begin() + (slice.sequence * tokens + slice.first) * width;
            rows.insert(rows.end(), from, from + slice.count * width);
        }
        return rows;
    }
};

// Where the slices' tokens begin in a call, and where the last one's end.
std::vector<int64_t> offsets(const std::vector<Slice>& slices);

// The form of pages of P.
template <typename P>
constexpr int64_t FORM = std::is_same_v<P, float>    ? vlm::KV_FLOAT32
                         : std::is_same_v<P, bf16>   ? vlm::KV_BFLOAT16
                         : std::is_same_v<P, float8> ? vlm::KV_FLOAT8
                                                     : vlm::KV_INT8;

// Keys or values of P that are numbers, and scales or zero points for them.
template <typename P>
std::vector<P> stored(Random& random, int64_t count, float scale = 1.0f) {
    if constexpr (sizeof(P) > 1) return random.numbers<P>(count, scale);
    std::vector<P> all(count);
    if constexpr (sizeof(P) == 1)
        for (P& each : all)  // all but float8's NaN
            each.bits = (uint8_t)(random.below(127) + 128 * random.below(2));
    return all;
}
inline std::vector<vlm::f16> scales(Random& random, int64_t count) {
    std::vector<vlm::f16> all(count);
    for (vlm::f16& each : all) each.bits = (uint16_t)(0x2000 + random.below(0x400));
    return all;
}

void linear_cases();
void attention_cases();
void delta_cases();
void conv_cases();
void rows_cases();
void step_cases();
void tower_cases();
void ranks_cases();
void scheduler_cases();
void self_cases();

}  // namespace cases
