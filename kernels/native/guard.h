// The edge between C++ and its callers: no exception may cross it, nor leave a thread of a parallel
// region.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>

#include "sharing.h"

namespace vlm {

// Other ranks have given up a step, or one of them did not come.
struct Apart {};

// Runs `work`; 0, or 1 if there was not enough memory for it, 3 if other ranks have left it, 2 if
// it failed in another way.
template <typename Work>
int64_t guarded(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::length_error&) {  // more than a vector may ever have
        return 1;
    } catch (const Apart&) {
        return 3;
    } catch (...) {
        return 2;
    }
}

// Runs `prepare` on every one of `threads` threads, where it may ask for memory that lasts, and
// then their common `work(sharing)`. Throws std::bad_alloc if one of them has not enough, before
// any works.
template <typename Prepare, typename Work>
void on_all_threads(int64_t threads, const Prepare& prepare, const Work& work) {
    static thread_local Sharing own;
    Sharing& sharing = own;
    sharing.begin(threads);
    std::atomic<int64_t> failed{0};
#pragma omp parallel num_threads((int)threads)
    {
        failed += guarded(prepare);
#pragma omp barrier
        if (!failed) work(sharing);
    }
    if (failed) throw std::bad_alloc();
}

}  // namespace vlm
