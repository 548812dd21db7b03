// What a machine can do at best: multiply-adds in registers, and plain reads of memory. Vectors are
// as wide as the processor's, so that the compiler keeps each in one register.

#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int WIDTH = 64, CHAINS = 20;
#elif defined(__AVX__)
constexpr int WIDTH = 32, CHAINS = 12;
#else
constexpr int WIDTH = 16, CHAINS = 20;
#endif

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(WIDTH)));
typedef uint64_t Words __attribute__((vector_size(WIDTH)));

template <typename Work>
static void on_threads(int64_t threads, Work work) {
    std::vector<std::thread> others;
    for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    work(0);
    for (auto& other : others) other.join();
}

extern "C" {

int64_t floats_per_step() { return CHAINS * (WIDTH / 4); }

// Every chain waits for itself alone; together they keep all units busy. They start from different
// values, or the compiler would compute one for all.
void multiply_add(int64_t steps, int64_t threads, float factor, float* results) {
    on_threads(threads, [=](int64_t thread) {
        Floats sums[CHAINS];
        for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = Floats{} + (factor + chain);
        const Floats by = Floats{} + factor, plus = Floats{} + 1.0f;
        for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 32
            for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = sums[chain] * by + plus;
        Floats all{};
        for (auto& sum : sums) all += sum;
        float result = 0;
        for (int lane = 0; lane < WIDTH / 4; ++lane) result += all[lane];
        results[thread] = result;
    });
}

// Likewise products of bytes summed by fours; returns how many operations a step is, 0 where they
// are not one instruction of 64 bytes.
int64_t byte_dots(int64_t steps, int64_t threads, float* results) {
#if defined(__AVX512VNNI__)
    on_threads(threads, [=](int64_t thread) {
        __m512i sums[CHAINS], by = _mm512_set1_epi8((char)(steps % 7 + 1));
        for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = _mm512_set1_epi32(chain);
        for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 32
            for (int chain = 0; chain < CHAINS; ++chain)
                sums[chain] = _mm512_dpbusd_epi32(sums[chain], by, by);
        __m512i all = _mm512_setzero_si512();
        for (auto& sum : sums) all = _mm512_add_epi32(all, sum);
        results[thread] = (float)_mm512_reduce_add_epi32(all);
    });
    return CHAINS * 2 * 64;
#else
    (void)steps, (void)threads, (void)results;
    return 0;
#endif
}

// `bytes` is a multiple of 512 * threads.
void read(const char* memory, int64_t bytes, int64_t threads, uint64_t* results) {
    on_threads(threads, [=](int64_t thread) {
        const int64_t count = bytes / threads / WIDTH;
        const Words* words = reinterpret_cast<const Words*>(memory) + thread * count;
        Words sums[8] = {};
        for (int64_t index = 0; index < count; index += 8)
#pragma GCC unroll 8
            for (int part = 0; part < 8; ++part) sums[part] += words[index + part];
        uint64_t result = 0;
        for (auto& sum : sums)
            for (int lane = 0; lane < WIDTH / 8; ++lane) result += sum[lane];
        results[thread] = result;
    });
}
}
