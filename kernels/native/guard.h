// The edge between C++ and its callers: no exception may cross it.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>

namespace vlm {

// Runs `work`; 0, or 1 if there was not enough memory for it, 2 if it failed in another way.
template <typename Work>
int64_t guarded(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::length_error&) {  // more than a vector may ever have
        return 1;
    } catch (...) {
        return 2;
    }
}

}  // namespace vlm
