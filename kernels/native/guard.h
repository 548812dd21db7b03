// The boundary between C++ and its callers: no exception may cross it, or leave a thread of a
// parallel region.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>

#include "loop_scheduler.h"

namespace vlm {

// Thrown when another rank has given up a step, or did not arrive in time.
struct StepAbandoned {};

// Runs `work` and returns 0. Returns 1 if memory ran out, 3 if another rank left the step, 2 for
// any other failure.
template <typename Work>
int64_t guarded(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::length_error&) {  // more than a vector can ever hold
        return 1;
    } catch (const StepAbandoned&) {
        return 3;
    } catch (...) {
        return 2;
    }
}

// Runs `prepare` on each of `threads` threads, where it may allocate thread-local memory, and then
// `work(scheduler)` on all of them. Throws std::bad_alloc before any work if one of them runs out
// of memory.
template <typename Prepare, typename Work>
void on_all_threads(int64_t threads, const Prepare& prepare, const Work& work) {
    static thread_local LoopScheduler own;
    LoopScheduler& scheduler = own;
    scheduler.begin(threads);
    std::atomic<int64_t> failed{0};
#pragma omp parallel num_threads((int)threads)
    {
        failed += guarded(prepare);
#pragma omp barrier
        if (!failed) work(scheduler);
    }
    if (failed) throw std::bad_alloc();
}

}  // namespace vlm
