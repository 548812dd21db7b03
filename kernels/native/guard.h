// The edge between C++ and its callers: no exception may cross it.
#pragma once

#include <cstdint>
#include <new>

namespace vlm {

// Runs `work`; 0, or 1 if there was not enough memory for it.
template <typename Work>
int64_t guarded(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace vlm
