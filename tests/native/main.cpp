// Calls every kernel with seeded inputs and prints a digest of each result; isa.py builds this
// program for several processors and compares what they print. The first lines say what it was
// compiled for. Exits with 1 if a result depends on the number of threads or on other rows.
#include <cstdio>
#include <cstdlib>

#include "cases.h"

namespace cases {

static int64_t failures = 0;

static const char* words(int64_t bits) { return bits == 32 ? "float32" : "bf16"; }

void expect(bool alike, int64_t bits, const std::string& name, const std::string& what) {
    if (alike) return;
    ++failures;
    std::printf("differs %s %s: %s\n", words(bits), name.c_str(), what.c_str());
}

void report(int64_t bits, const std::string& name, const std::function<Digest(int64_t)>& run) {
    const uint64_t one = run(1).value();
    for (int64_t threads : {2, 3})
        expect(run(threads).value() == one, bits, name, std::to_string(threads) + " threads");
    std::printf("%s %s %016llx\n", words(bits), name.c_str(), (unsigned long long)one);
}

void must(int64_t result, const char* kernel) {
    if (!result) return;
    std::printf("failed %s with %lld\n", kernel, (long long)result);
    std::exit(2);
}

std::vector<int64_t> offsets(const std::vector<Slice>& slices) {
    std::vector<int64_t> all{0};
    for (const Slice& slice : slices) all.push_back(all.back() + slice.count);
    return all;
}

}  // namespace cases

int main() {
    const char* products = vlm::HAS_BF16_DOT ? "pairs" : "singles";
    if (vlm::HAS_AMX) products = "tiles";
    std::printf("width %d\nproducts %s\n", vlm::WIDTH, products);
    cases::linear_cases();
    cases::attention_cases();
    cases::delta_cases();
    cases::conv_cases();
    cases::rows_cases();
    cases::step_cases();
    cases::tower_cases();
    cases::ranks_cases();
    cases::scheduler_cases();
    cases::self_cases();
    return cases::failures != 0;
}
